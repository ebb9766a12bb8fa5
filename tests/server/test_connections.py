"""Silent, slow, unread and too many connections, over sockets."""

import json
import logging
import socket
import ssl
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.protocols.http.h11_impl import H11Protocol

from ssd_serve.base.messages import Abort
from ssd_serve.base.settings import Settings
from ssd_serve.server.http.connections import ConnectionLimiter
from ssd_serve.server.http.listening import max_connections
from ssd_serve.server.limits import Limits
from tests.server.fakes import PATIENCE_S, say
from tests.server.running_server import ListeningServer, listening_server
from tests.server.test_tls import make_pair, trusting

COMPLETIONS = "/v1/completions"
SOON = Limits(head_s=0.3, unread_s=0.5)


@contextmanager
def connected(address: ListeningServer) -> Generator[socket.socket]:
    with socket.create_connection(("127.0.0.1", int(address.url.rpartition(":")[2])), 10.0) as client:
        yield client


def is_closed(client: socket.socket) -> bool:
    try:
        while client.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def takes(client: socket.socket, data: bytes) -> bool:
    try:
        client.sendall(data)
        return client.recv(65536) != b""
    except ConnectionError:
        return False


def drip(client: socket.socket, data: bytes) -> int:
    """Send a byte every tenth of a second until it is closed; how many were sent."""
    client.settimeout(0.1)
    for sent in range(len(data)):
        with suppress(TimeoutError):
            if not takes(client, data[sent : sent + 1]):
                return sent
    raise AssertionError("it was never closed")


def test_silent_connection_is_closed() -> None:
    with listening_server(lambda _: say("x"), limits=SOON) as address, connected(address) as silent:
        began = time.monotonic()
        assert is_closed(silent)
        assert time.monotonic() - began < PATIENCE_S


def test_slow_later_head_is_closed_at_its_deadline() -> None:
    with listening_server(lambda _: say("x"), limits=SOON) as address, connected(address) as client:
        for _ in range(2):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            received = b""
            while not received.endswith(b"}"):
                received += client.recv(65536)
            assert received.startswith(b"HTTP/1.1 200")
        assert drip(client, b"GET /health HTTP/1.1\r\n" + b"X-More: and more\r\n" * 20) < 100


def test_rest_of_an_early_answered_body_has_a_deadline() -> None:
    limits = Limits(head_s=0.1, body_timeout_s=0.5)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
    with listening_server(lambda _: say("x"), limits=limits) as address, connected(address) as client:
        client.sendall(head.encode())
        assert client.recv(65536).startswith(b"HTTP/1.1 415")
        assert drip(client, b"x" * 500) < 200


def test_connection_is_reused_after_an_early_answer() -> None:
    limits = Limits(body_timeout_s=0.3)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"
    with listening_server(lambda _: say("x"), limits=limits) as address, connected(address) as client:
        for _ in range(2):
            client.sendall(head.encode())
            received = b""
            while not received.endswith(b"}"):
                received += client.recv(65536)
            assert received.startswith(b"HTTP/1.1 415")
            client.sendall(b"x" * 5)
            time.sleep(0.05)
            client.sendall(b"x" * 5)
            time.sleep(2 * limits.body_timeout_s)


def test_keep_alive_lasts_longer_than_the_head_timeout() -> None:
    with listening_server(lambda _: say("x"), limits=SOON) as address, httpx.Client() as client:
        mine: set[object] = set()
        for _ in range(3):
            with client.stream("GET", f"{address.url}/health") as answer:
                answer.read()
                mine.add(answer.extensions["network_stream"].get_extra_info("client_addr"))
            time.sleep(2 * SOON.head_s)
        assert len(mine) == 1


def test_running_request_has_no_head_deadline() -> None:
    with (
        listening_server(lambda _: say("abc", hold_after=0), limits=SOON) as address,
        connected(address) as client,
    ):
        body = b'{"prompt": "a"}'
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(3 * SOON.head_s)
        address.engine.released.set()
        assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_connection_limit_closes_the_oldest_idle_connection() -> None:
    settings = Settings(max_connections=8, drain_seconds=1)
    with listening_server(lambda _: say("x"), settings) as address, ExitStack() as stack:
        idle: list[socket.socket] = []
        http = stack.enter_context(httpx.Client(headers={"Connection": "close"}))
        for _ in range(12):
            idle.append(stack.enter_context(connected(address)))
            assert http.get(f"{address.url}/health").status_code == 200
        assert is_closed(idle[0])
        idle[-1].settimeout(0.2)
        assert not is_closed(idle[-1])


def test_connection_limit_closes_unfinished_requests() -> None:
    settings = Settings(max_connections=8, drain_seconds=1)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with listening_server(lambda _: say("x"), settings) as address, ExitStack() as stack:
        sending = [stack.enter_context(connected(address)) for _ in range(8)]
        for one in sending:
            one.sendall(f"{head}Content-Length: 1000\r\n\r\n[".encode())
        for _ in range(4):
            body = {"prompt": "a"}
            assert httpx.post(f"{address.url}{COMPLETIONS}", json=body).status_code == 200
        assert is_closed(sending[0])


def test_connection_limit_of_active_requests_answers_503() -> None:
    settings = Settings(max_connections=2, drain_seconds=1)
    body = {"prompt": "a", "stream": True}
    with listening_server(lambda _: say("abcdef", hold_after=1), settings) as address:
        url = f"{address.url}{COMPLETIONS}"
        with httpx.stream("POST", url, json=body) as one, httpx.stream("POST", url, json=body) as other:
            refused = httpx.post(url, json=body)
            health = httpx.get(f"{address.url}/health")
            address.engine.released.set()
            ends = [list(stream.iter_lines())[-2] for stream in (one, other)]
        assert httpx.post(url, json={"prompt": "a"}).status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
    assert "SSD_MAX_CONNECTIONS" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"] == "1"
    assert (health.status_code, ends) == (200, ["data: [DONE]"] * 2)


def test_received_bytes_are_parsed_in_order_in_short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks, parse = list[bytes](), H11Protocol.data_received

    def data_received(self: H11Protocol, data: bytes) -> None:
        chunks.append(data)
        parse(self, data)

    monkeypatch.setattr(H11Protocol, "data_received", data_received)
    text = "".join(chr(97 + number * number % 23) for number in range(100_000))
    with listening_server(lambda _: say("x")) as address:
        refused = httpx.post(f"{address.url}{COMPLETIONS}", json={"prompt": text})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert text.encode() in b"".join(chunks)
    assert max(map(len, chunks)) == 4096


def test_request_counts_as_active_only_when_complete() -> None:
    settings = Settings(max_connections=1, drain_seconds=1)
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with (
        listening_server(lambda _: say("abcdef", hold_after=1), settings) as address,
        httpx.stream(
            "POST", f"{address.url}{COMPLETIONS}", content=body, headers={"Content-Type": "application/json"}
        ),
    ):
        with connected(address) as other:
            other.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
            assert other.recv(65536).startswith(b"HTTP/1.1 503")
        address.engine.released.set()


@contextmanager
def reading_little(address: ListeningServer, choices: int, length: int) -> Generator[socket.socket]:
    more = {"return_token_ids": True, "stream_options": {"continuous_usage_stats": True}}
    request = {"prompt": "a", "n": choices, "max_tokens": length, "stream": True, **more}
    body = json.dumps(request).encode()
    head = f"POST {COMPLETIONS} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(PATIENCE_S)
        client.connect(("127.0.0.1", int(address.url.rpartition(":")[2])))
        client.sendall(f"{head}\r\n".encode() + body)
        yield client


@pytest.mark.parametrize("bytes_a_time", [0, 512])
def test_client_that_reads_too_little_is_aborted(bytes_a_time: int) -> None:
    with (
        listening_server(lambda _: say("x" * 200, group=1), limits=SOON, send_buffer=4096) as address,
        reading_little(address, 8, 200) as client,
    ):
        engine = address.engine
        engine.wait_for(lambda: len(engine.submits()) == 8)
        deadline = time.monotonic() + 60.0
        while httpx.get(f"{address.url}/load").json()["server_load"] != 0:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        page = ""
        while 'finished_reason="abort"' not in page:  # it is over for the server, too
            assert time.monotonic() < deadline, page
            page = httpx.get(f"{address.url}/metrics").text
            if bytes_a_time:
                client.recv(bytes_a_time)
            time.sleep(0.05)


def test_slow_steady_reader_gets_everything() -> None:
    limits = Limits(unread_s=0.5, min_read_bytes=2048)
    with (
        listening_server(lambda _: say("x" * 200, group=1), limits=limits) as address,
        reading_little(address, 32, 200) as client,
    ):
        whole = bytearray()
        began = time.monotonic()
        while part := client.recv(16384):
            whole += part
            time.sleep(0.03 if time.monotonic() - began < 2.0 else 0.0)
        assert whole.endswith(b"data: [DONE]\n\n")
        assert not address.engine.sent(Abort)


def test_unfinished_tls_handshake_is_closed(tmp_path: Path) -> None:
    settings = make_pair(tmp_path, "a")
    with listening_server(lambda _: say("x"), settings, SOON) as address, connected(address) as silent:
        with connected(address) as dripping:
            hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)
            assert drip(dripping, hello) < 200
        assert is_closed(silent)
        assert httpx.get(f"{address.url}/health", verify=trusting(settings)).status_code == 200


def test_connection_limit_closes_unfinished_tls_handshakes(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "a")
    settings = pair.model_copy(update={"max_connections": 8})
    with listening_server(lambda _: say("x"), settings) as address, ExitStack() as stack:
        silent = [stack.enter_context(connected(address)) for _ in range(20)]
        assert httpx.get(f"{address.url}/health", verify=trusting(pair)).status_code == 200
        assert is_closed(silent[0])


def test_request_sent_with_the_tls_handshake_is_answered(tmp_path: Path) -> None:
    settings = make_pair(tmp_path, "a")
    with listening_server(lambda _: say("x"), settings) as address, connected(address) as plain:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = trusting(settings).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                plain.sendall(outgoing.read())
                incoming.write(plain.recv(65536))
        tls.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        plain.sendall(outgoing.read())  # the handshake's last word and the request in one
        received = b""
        while b'"status"' not in received:
            with suppress(ssl.SSLWantReadError):
                received += tls.read()
                continue
            incoming.write(plain.recv(65536))
        assert received.startswith(b"HTTP/1.1 200")


def test_garbage_during_a_request_closes_the_connection_without_error_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with listening_server(lambda _: say("x")) as address, connected(address) as client:
        client.sendall(head.encode())
        assert client.recv(65536).startswith(b"HTTP/1.1 415")
        client.sendall(b"no chunk at all\r\n")
        assert is_closed(client)
        assert httpx.get(f"{address.url}/health").status_code == 200
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


class FakeConnection:
    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


EVENTS = st.tuples(st.sampled_from(["connect", "receive", "activate", "idle", "close"]), st.integers(0, 9))


@given(limit=st.integers(1, 5), events=st.lists(EVENTS))
def test_connection_limiter_properties(limit: int, events: list[tuple[str, int]]) -> None:
    limiter = ConnectionLimiter(limit)
    idle, receiving, active = list[FakeConnection](), list[FakeConnection](), list[FakeConnection]()
    for event, number in events:
        present = [*idle, *receiving, *active]
        chosen = present[number % len(present)] if present and event != "connect" else FakeConnection()
        abortable = [each for each in [*idle, *receiving] if each is not chosen]
        if event == "connect":
            idle.append(chosen)
            limiter.mark_idle(chosen)
        elif event == "receive" and chosen in idle:
            idle.remove(chosen)
            receiving.append(chosen)
            limiter.mark_receiving(chosen)
        elif event == "receive" and chosen in receiving:
            limiter.mark_receiving(chosen)
        elif event == "idle" and chosen in active:
            active.remove(chosen)
            idle.append(chosen)
            limiter.mark_idle(chosen)
        elif event in ("activate", "close") and chosen in present:
            idle, receiving, active = (
                [each for each in group if each is not chosen] for group in (idle, receiving, active)
            )
            if event == "activate":
                active.append(chosen)
                limiter.mark_active(chosen)
            else:
                limiter.remove(chosen)
        aborted = [each for each in [*idle, *receiving, *active] if each.aborted]
        assert aborted == abortable[: len(aborted)], "idle connections first, the oldest first"
        idle, receiving = ([each for each in group if not each.aborted] for group in (idle, receiving))
        assert len(limiter) == len(idle) + len(receiving) + len(active)
        assert len(limiter) <= max(limit, len(active) + 1)
        for each in [*idle, *receiving, *active, FakeConnection()]:
            others = [other for other in active if other is not each]
            assert limiter.exhausted_for(each) == (len(others) >= limit)


@pytest.mark.parametrize(
    ("fields", "descriptors", "most"),
    [
        ({}, 1 << 20, 4 * (32 + 256) + 64),
        ({}, 1024, 864),
        ({}, 256, 128),
        ({"max_connections": 5}, 1024, 5),
        ({"max_connections": 5000}, 1024, 864),
    ],
)
def test_connection_limit_from_capacity_and_descriptors(
    fields: dict[str, int], descriptors: int, most: int
) -> None:
    assert max_connections(Settings.model_validate(fields), descriptors) == most
