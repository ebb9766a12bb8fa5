"""Tests of a server on a real socket: the official client, disconnects, drain and signals."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from ssd_serve.base.messages import Abort, Submit
from ssd_serve.bench.serve import by_label
from ssd_serve.server.http.listening import listen
from ssd_serve.server.http.serving import stop_signals
from ssd_serve.server.limits import Limits
from tests.server.fakes import END, PATIENCE_S, Script, say, tokens
from tests.server.running_server import ListeningServer, listening_server, wait_until_healthy

COMPLETIONS = "/v1/completions"


def official(address: ListeningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address.url}/v1", api_key="any", max_retries=0)


def answer(submit: Submit) -> Script:
    """Return a text that ends with the seed's last digit and contains a multi-byte character."""
    return tokens([*f"Hi 🙂 {submit.seed % 10}".encode(), END], group=4)


def test_connections_disable_nagle() -> None:
    """asyncio sets TCP_NODELAY only on sockets with the protocol IPPROTO_TCP."""
    with listen("127.0.0.1", 0) as server, socket.create_connection(server.getsockname()):
        connection, _ = server.accept()
        with connection:
            assert connection.proto == socket.IPPROTO_TCP


def test_openai_client_streams_completions_and_chats() -> None:
    with listening_server(answer) as address, official(address) as client:
        assert [model.id for model in client.models.list()] == ["ssd-embedded"]
        parts: list[str] = []
        with client.completions.create(
            model="ssd-embedded", prompt="x", stream=True, seed=3, max_tokens=50
        ) as stream:
            parts.extend(chunk.choices[0].text for chunk in stream)
        assert "".join(parts) == "Hi 🙂 3"

        said: list[str] = []
        finished: str | None = None
        tokens_used = 0
        with client.chat.completions.create(
            model="ssd-embedded",
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
            seed=4,
        ) as chat:
            for chunk in chat:
                if chunk.usage is not None:
                    tokens_used = chunk.usage.completion_tokens
                for choice in chunk.choices:
                    said.append(choice.delta.content or "")
                    finished = choice.finish_reason or finished
        assert "".join(said) == "Hi 🙂 4"
        assert (finished, tokens_used) == ("stop", 10)


def test_openai_client_raises_typed_errors() -> None:
    with listening_server(answer) as address, official(address) as client:
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt", prompt="x")
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="ssd-embedded", prompt="x", max_tokens=100000)
        assert caught.value.param == "max_tokens"


def test_openai_client_gets_an_error_when_the_engine_dies() -> None:
    with listening_server(lambda _: say("abcdef", hold_after=1)) as address, official(address) as client:
        with client.completions.create(model="ssd-embedded", prompt="x", stream=True) as stream:
            received = iter(stream)
            next(received)
            address.engine.die()
            with pytest.raises(openai.APIError, match="engine process ended"):
                list(received)
        assert httpx.get(f"{address.url}/health").status_code == 503


def test_waiting_stream_sends_pings() -> None:
    limits = Limits(ping_s=0.05)
    script = say("abcdef", hold_after=1)
    with listening_server(lambda _: script, limits=limits) as address, official(address) as client:
        with client.completions.create(model="ssd-embedded", prompt="x", stream=True) as stream:
            received = iter(stream)
            first = next(received)
            time.sleep(0.3)
            address.engine.released.set()
            texts = [chunk.choices[0].text for chunk in received]
        assert first.choices[0].text + "".join(texts) == "abcdef"
        address.engine.released.clear()
        url = f"{address.url}{COMPLETIONS}"
        with httpx.stream("POST", url, json={"prompt": "a", "stream": True}) as response:
            lines = response.iter_lines()
            while next(lines) != ": ping":
                pass


def test_head_request_has_the_headers_of_get() -> None:
    with listening_server(answer) as address, httpx.Client(base_url=address.url) as client:
        for path in ("/health", "/ping", "/v1/models", "/v1/models/ssd-embedded", "/version", "/load"):
            got, head = client.get(path), client.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == got.headers["content-length"] != "0"
        assert client.head("/v1/models/other").status_code == 404
        assert client.head(COMPLETIONS).status_code == 405


def test_upgrade_header_is_ignored() -> None:
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    request = f"GET /health HTTP/1.1\r\nHost: x\r\n{upgrade}Sec-WebSocket-Key: dGhlIHNhbXBsZQ==\r\n\r\n"
    with listening_server(answer) as address:
        at = ("127.0.0.1", int(address.url.rpartition(":")[2]))
        with socket.create_connection(at, PATIENCE_S) as client:
            for _ in range(2):
                client.sendall(request.encode())
                received = b""
                while not received.endswith(b"}"):
                    received += client.recv(65536)
                assert received.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_after", [0, 1])
def test_disconnect_aborts_requests(stream: bool, hold_after: int) -> None:
    body = json.dumps({"prompt": "a", "n": 2, "stream": stream}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with listening_server(lambda _: say("abcdef", hold_after=hold_after)) as address:
        engine = address.engine
        port = int(address.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            engine.wait_for(lambda: len(engine.submits()) == 2)
            if stream and hold_after:
                assert client.recv(100).startswith(b"HTTP/1.1 200")
        engine.wait_for(lambda: len(engine.sent(Abort)) == 2)
        assert httpx.get(f"{address.url}/load").json()["server_load"] == 0
        page = httpx.get(f"{address.url}/metrics").text
        assert by_label(page, "ssd_request_success_total", "finished_reason")["abort"] == 2.0


def fill(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x" * 65536)


def test_unacknowledged_data_closes_the_connection() -> None:
    with listen("127.0.0.1", 0, unacknowledged_s=1.0) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.getsockname())
        connection, _ = server.accept()
        with connection:
            connection.settimeout(10.0)
            with pytest.raises(OSError, match="timed out") as caught:
                fill(connection)
            assert caught.value.errno == errno.ETIMEDOUT, "not by the test's own limit"


def test_requests_while_loading_are_answered_503() -> None:
    with listening_server(lambda _: say(""), ready=False) as address:
        at = ("127.0.0.1", int(address.url.rpartition(":")[2]))
        with socket.create_connection(at) as silent, socket.create_connection(at) as dripping:
            for sent in (b"G", b"E", b"T"):
                dripping.sendall(sent)
                answer = httpx.post(f"{address.url}{COMPLETIONS}", json={"prompt": "a" * 200_000})
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
                assert answer.headers["retry-after"] == "2"
                assert httpx.get(f"{address.url}/ping").status_code == 503
            silent.sendall(b"GET")
            address.stop()
            assert address.stopped.wait(PATIENCE_S), "it waits for last words, and not for the silent"


def test_drain_finishes_running_requests() -> None:
    with listening_server(lambda _: say("abcdef", hold_after=1)) as address:
        url = f"{address.url}{COMPLETIONS}"
        with httpx.stream("POST", url, json={"prompt": "a", "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            address.stop()
            time.sleep(0.2)
            address.engine.released.set()
            assert list(lines)[-2] == "data: [DONE]"
        assert address.stopped.wait(5.0)


def test_drain_aborts_requests_after_its_time() -> None:
    with listening_server(lambda _: say("abcdef", hold_after=1)) as address:
        url = f"{address.url}{COMPLETIONS}"
        with httpx.stream("POST", url, json={"prompt": "a", "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            address.stop()
            address.engine.wait_for(lambda: len(address.engine.sent(Abort)) == 1)
            assert "the server is shutting down" in list(lines)[-2]
        assert address.stopped.wait(5.0)


SERVING = """
import asyncio
import socket
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.http.serving import build_server
from ssd_serve.base.settings import Settings
from tests.server.fakes import READY, ByteTokenizer, FakeEngine, channel_pair, say

ours, theirs = channel_pair()
engine = FakeEngine(theirs, lambda _: say("hi"))
engine.tell(READY)
engine.start()
with socket.create_server(("127.0.0.1", 0)) as sock:
    print(sock.getsockname()[1], flush=True)
    server = build_server(Settings(drain_seconds=60), EngineClient(ours), ByteTokenizer)
    asyncio.run(server.serve(sockets=[sock]))
print("tidied up", flush=True)
"""


@contextmanager
def served(script: str) -> Generator[tuple["subprocess.Popen[str]", str]]:
    """Start a server process with an engine of this script; yield it and its URL once it is healthy."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", SERVING.replace('say("hi")', script)]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'src'}"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=root, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        try:
            wait_until_healthy(url)
            yield process, url
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_stops_the_server_and_returns(number: signal.Signals) -> None:
    with served('say("hi")') as (process, url):
        httpx.post(f"{url}{COMPLETIONS}", json={"prompt": "a"}).raise_for_status()
        process.send_signal(number)
        assert process.communicate(timeout=50) == ("tidied up\n", "")
        assert process.returncode == 0


def test_sighup_ignored_by_nohup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert stop_signals() == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_later_second_signal_ends_the_drain() -> None:
    body = {"prompt": "a", "stream": True}
    with (
        served('say("hihihi", hold_after=1)') as (process, url),
        httpx.stream("POST", f"{url}{COMPLETIONS}", json=body, timeout=30.0) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        began = time.monotonic()
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        time.sleep(1.0)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert "the server is shutting down" in list(lines)[-2]
        assert process.communicate(timeout=50) == ("tidied up\n", "")
        assert time.monotonic() - began < 50.0, "it waited all the same"
