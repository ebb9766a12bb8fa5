"""Tests of attacks on the port of remote drafters, with and without the cluster key."""

import contextlib
import itertools
import socket
import time
from collections.abc import Callable, Generator, Mapping

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from ssd_serve.base.draft_messages import (
    NOISE_SCHEME,
    PROTOCOL_VERSION,
    Growth,
    Heartbeat,
    Hello,
    Message,
    Open,
    Outcome,
    Refusal,
    Resync,
)
from ssd_serve.base.errors import ProtocolError, SettingsError
from ssd_serve.base.messages import Abort
from ssd_serve.cache.expansions import ROOT_STEP, Expansion, pack
from ssd_serve.models.hub import resolve_model
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.transport.channel import SocketChannel
from ssd_serve.transport.framing import FrameWriter
from ssd_serve.transport.handshake import connect_tls
from ssd_serve.transport.listener import connect
from ssd_serve.transport.tls import TlsStream, identity
from tests.hostile.target_server import TargetServer, start_target_server
from tests.servers import free_port

KEY = "the cluster key of these tests"


class MaliciousDrafter:
    """A drafter that knows the cluster key, at its own loopback address."""

    def __init__(self, port: int, address: str, hello: Hello) -> None:
        connection = socket.create_connection(("127.0.0.1", port), 30.0, source_address=(address, 0))
        deadline = time.monotonic() + 30.0
        self.channel = SocketChannel(
            connection, tls=connect_tls(connection, identity(KEY), address, deadline, lambda: False)
        )
        self.hello = hello
        self.received: list[Message] = []

    def send(self, *messages: Message) -> None:
        writer = FrameWriter()
        self.send_bytes(b"".join(bytes(writer.encode(message)) for message in messages))

    def send_bytes(self, data: bytes) -> None:
        """Send until all is written or the connection is closed."""
        sealed = self.channel._tls  # pyright: ignore[reportPrivateUsage]
        assert sealed is not None
        self.channel._outgoing += sealed.encrypt(data)  # pyright: ignore[reportPrivateUsage]
        deadline = time.monotonic() + 20.0
        while not self.channel.flush() and not self.channel.closed and time.monotonic() < deadline:
            self.receive()
            time.sleep(0.002)

    def receive(self) -> None:
        with contextlib.suppress(ProtocolError):
            self.received += self.channel.receive()

    def await_close(self, seconds: float = 30.0) -> bool:
        """Return True once the server has closed the connection."""
        deadline = time.monotonic() + seconds
        while not self.channel.closed and time.monotonic() < deadline:
            self.channel.wait(0.1)
            self.receive()
        return self.channel.closed

    def join(self, seconds: float = 30.0) -> None:
        self.send(self.hello)
        deadline = time.monotonic() + seconds
        while not any(isinstance(each, Hello) for each in self.received):
            assert time.monotonic() < deadline
            assert not self.channel.closed, self.received
            self.channel.wait(0.1)
            self.receive()

    def roots(self, seconds: float = 30.0) -> dict[int, Open | Outcome]:
        """Wait for a request; return the last message about each one."""
        deadline = time.monotonic() + seconds
        while True:
            self.receive()
            states = {each.request: each for each in self.received if isinstance(each, Open | Outcome)}
            if states or self.channel.closed:
                return states
            assert time.monotonic() < deadline
            self.send(Heartbeat(step_ms=self.hello.step_ms))  # a drafter without heartbeats gets no request
            self.channel.wait(0.1)


class Attacked:
    """A server with a drafter of its own, and a port for remote ones."""

    def __init__(self, server: TargetServer, port: int, hello: Hello) -> None:
        self.server = server
        self.port = port
        self.address = f"tcp://127.0.0.1:{port}"
        self._hello = hello
        self._numbers = itertools.count(2)

    @contextlib.contextmanager
    def drafter(
        self, address: str = "", change: Mapping[str, object] | None = None
    ) -> Generator[MaliciousDrafter]:
        """Connect a drafter with a `Hello` changed by the fields in `change`."""
        number = next(self._numbers)
        hello = replace(self._hello, **{"name": f"stranger-{number}", **(change or {})})
        drafter = MaliciousDrafter(
            self.port, address or f"127.0.{1 + number // 200}.{1 + number % 200}", hello
        )
        try:
            yield drafter
        finally:
            drafter.channel.close()

    def raw_connection(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20.0)

    def check_key_still_works(self) -> None:
        connect(self.address, 20.0, key=KEY).close()

    def drafters(self) -> dict[str, float]:
        """Return the requests of each drafter by name, from the metrics."""
        page = httpx.get(f"{self.server.url}/metrics", timeout=30.0, verify=False).text
        lines = [line for line in page.splitlines() if line.startswith("ssd_drafter_requests{")]
        return {line.split('"')[1]: float(line.split()[-1]) for line in lines}

    @contextlib.contextmanager
    def unharmed(self) -> Generator[None]:
        """Assert that other clients are unharmed, and that the server's own drafter still works."""
        pids = self.server.workers()
        with self.server.unharmed():
            yield
        assert self.server.workers()["ssd: drafter-0"].pid == pids["ssd: drafter-0"].pid
        deadline = time.monotonic() + 20.0
        while "drafter-0" not in self.drafters():
            assert time.monotonic() < deadline, self.server.log
            time.sleep(0.2)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Generator[Attacked]:
    """SSD_SPECULATION_MAY_STOP=false: attacks could make plain decoding faster, without drafters."""
    port = free_port()
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        noise=NOISE_SCHEME,
        tokenizer=Tokenizer(resolve_model("embedded", "draft")).vocabulary_hash(),
        source="embedded",
        step_ms=1.0,
    )
    with start_target_server(
        tmp_path_factory.mktemp("attacked"),
        SSD_DRAFTER_ADDRESS=f"tcp://127.0.0.1:{port}",
        SSD_CLUSTER_KEY=KEY,
        SSD_SPECULATION_MAY_STOP="false",
    ) as server:
        yield Attacked(server, port, hello)


def read_until_closed(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            received += part
    return received


def hello() -> bytes:
    """Return the first bytes of a correct handshake."""
    parts: list[bytes] = []
    TlsStream(identity(KEY), listening=False).handshake(b"", parts.append)
    return b"".join(parts)


INVALID_BYTES = {
    "messages without TLS": bytes(FrameWriter().encode(Heartbeat())) * 40,
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "zeros": bytes(100_000),
    "a frame length of four GiB": b"\xff" * 64,
    "a TLS alert": b"\x15\x03\x03\x00\x02\x02\x28",
    "a hello that is cut in two": hello()[:100] + b"\x00" * 1000,
    "a hello twice": hello() + hello(),
    "a hello, then messages without TLS": hello() + bytes(FrameWriter().encode(Heartbeat())),
}


def test_invalid_handshake_closes_the_connection(attacked: Attacked) -> None:
    with attacked.server.unharmed():
        for data in INVALID_BYTES.values():
            with attacked.raw_connection() as stranger:
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(data)
                read_until_closed(stranger)
                attacked.check_key_still_works()


def test_incomplete_handshake_times_out(attacked: Attacked) -> None:
    with (
        attacked.server.unharmed(),
        attacked.raw_connection() as silent,
        attacked.raw_connection() as leaving,
    ):
        silent.sendall(hello())
        leaving.sendall(hello())
        leaving.shutdown(socket.SHUT_WR)
        read_until_closed(leaving)
        began = time.monotonic()
        read_until_closed(silent)
        assert time.monotonic() - began < 30.0


def test_wrong_key_is_refused_with_a_message_and_few_log_lines(attacked: Attacked) -> None:
    with attacked.server.unharmed():
        for _ in range(30):
            with pytest.raises(SettingsError, match="has another key: set the same SSD_CLUSTER_KEY"):
                connect(attacked.address, 10.0, key="another key of these tests")
    refusals = attacked.server.log.count("drafter refused")
    assert 1 <= refusals < 10


def test_many_handshakes_do_not_delay_streams(attacked: Attacked) -> None:
    """Each handshake costs the listener a signature, in the loop that also decodes."""
    data, until = hello(), time.monotonic() + 4.0
    sent = 0
    with attacked.server.unharmed():
        while time.monotonic() < until:
            with contextlib.ExitStack() as stack:
                for _ in range(40):
                    stack.enter_context(attacked.raw_connection()).sendall(data)
                    sent += 1
                time.sleep(0.05)
        attacked.check_key_still_works()
    assert sent > 40


def raw(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def frames(*messages: Message) -> bytes:
    writer = FrameWriter()
    return b"".join(bytes(writer.encode(message)) for message in messages)


def deep(kind: str, depth: int) -> bytes:
    fields = msgspec.msgpack.encode({"type": kind, "protocol": PROTOCOL_VERSION})
    return raw(b"\x83" + fields[1:] + b"\xa7unknown" + b"\x91" * depth + b"\x00")


def grown(*expansions: Expansion, request: int = 1, epoch: int = 1, source: str = "x") -> Growth:
    return pack(request, epoch, 0, expansions, source, snapshot=False)


INVALID_MESSAGES = {
    "a deep frame": deep("Heartbeat", 1_500),
    "a very deep frame": deep("Growth", 1_000_000),
    "a frame of four GiB": b"\xff" * 64,
    "a name of 16 MiB": raw(bytes(16 << 20)),
    "a kind that drafters do not send": frames(Abort(1)),
    "a list longer than memory": raw(b"\x82\xa4type\xa6Growth\xa6tokens\xdd\xff\xff\xff\xff"),
    "a step that is no number": frames(Heartbeat(step_ms=float("nan"))),
    "a step of a year": frames(Heartbeat(step_ms=3e10)),
    "fewer nodes than none": frames(Heartbeat(nodes=-1)),
    "heartbeats without end": frames(Heartbeat()) * 200_000,
    "growth of nothing without end": frames(grown()) * 100_000,
    "growth of unknown requests without end": frames(grown(Expansion(1, ROOT_STEP, [1], [-1.0]))) * 100_000,
    "resyncs without end": frames(*(Resync(number, 1) for number in range(8))) * 20_000,
}


def test_protocol_violation_closes_the_connection(attacked: Attacked) -> None:
    with attacked.unharmed():
        for name, data in INVALID_MESSAGES.items():
            with attacked.drafter() as drafter:
                drafter.join()
                drafter.send_bytes(data)
                assert drafter.await_close(), name


HELLOS: dict[str, dict[str, object]] = {
    "a name of 1 MiB": {"name": "x" * (1 << 20)},
    "a name of two lines": {"name": "a\nverifier: all is well"},
    "a model of 1 MiB": {"source": "x" * (1 << 20)},
    "a model that was not named": {"source": "mine"},
    "a step that is no number": {"step_ms": float("nan")},
    "an infinite step": {"step_ms": float("inf")},
    "another tokenizer": {"tokenizer": "x" * (1 << 20)},
    "another noise": {"noise": "x" * (1 << 20)},
    "the name of the server's own drafter": {"name": "drafter-0"},
}


def test_invalid_hello_is_refused_with_a_short_message(attacked: Attacked) -> None:
    with attacked.unharmed():
        for name, change in HELLOS.items():
            with attacked.drafter(change=change) as drafter:
                drafter.send(drafter.hello)
                assert drafter.await_close(), name
                (refusal,) = drafter.received
                assert isinstance(refusal, Refusal), name
                assert 0 < len(refusal.message) <= 200, name
    assert "x" * 1000 not in attacked.server.log
    assert "\nverifier: all is well" not in attacked.server.log


def test_deeply_nested_hello_closes_the_connection(attacked: Attacked) -> None:
    with attacked.unharmed(), attacked.drafter() as drafter:
        drafter.send_bytes(deep("Hello", 5_000))
        assert drafter.await_close()


Flood = Callable[[int, Open | Outcome], bytes]


def _orphans(request: int, state: Open | Outcome) -> bytes:
    """Expansions of unknown nodes, in messages of a megabyte."""
    many = [Expansion(number, 1, [1, 2], [-1.0, -2.0]) for number in range(30_000)]
    return frames(grown(*many, request=request, epoch=state.epoch)) * 8


def _merges(request: int, state: Open | Outcome) -> bytes:
    """Repeated expansions of a wide root."""
    wide = Expansion(state.root, ROOT_STEP, list(range(1000)), [-9.0] * 1000)
    again = [Expansion(state.root, ROOT_STEP, [token], [-1.0]) for token in range(1000)]
    return frames(*[grown(wide, *again, request=request, epoch=state.epoch)] * 40)


def _sources(request: int, state: Open | Outcome) -> bytes:
    """Another source name in every message."""
    root = Expansion(state.root, ROOT_STEP, [5], [-1.0])
    return frames(
        *[grown(root, request=request, epoch=state.epoch, source=f"{n}" * 20_000) for n in range(300)]
    )


def _overconfident(request: int, state: Open | Outcome) -> bytes:
    """Wrong draft tokens with probability 1."""
    root = Expansion(state.root, ROOT_STEP, list(range(64)), [0.0] * 64)
    return frames(*[grown(root, request=request, epoch=state.epoch)] * 2_000)


@pytest.mark.parametrize("flood", [_orphans, _merges, _sources, _overconfident])
def test_flood_of_expansions_delays_no_round(attacked: Attacked, flood: Flood) -> None:
    with attacked.unharmed(), attacked.drafter(change={"step_ms": 0.01}) as drafter:
        drafter.join()
        for request, state in drafter.roots().items():
            drafter.send_bytes(flood(request, state))
        time.sleep(1.0)


def test_silent_drafters_are_disconnected_and_block_no_other(attacked: Attacked) -> None:
    with attacked.unharmed(), contextlib.ExitStack() as stack:
        silent = [stack.enter_context(attacked.drafter("127.0.0.77")) for _ in range(40)]
        with attacked.drafter() as honest:
            honest.join()
        assert all(drafter.await_close(40.0) for drafter in silent)


def test_banned_address_waits_longer_each_time(attacked: Attacked) -> None:
    with attacked.unharmed():
        waits: list[float] = []
        for _ in range(4):
            began = time.monotonic()
            while True:
                with (
                    contextlib.suppress(OSError, AssertionError),
                    attacked.drafter("127.0.0.79") as drafter,
                ):
                    drafter.join(5.0)
                    drafter.send(Heartbeat(step_ms=-1.0))
                    assert drafter.await_close()
                    break
                time.sleep(0.05)
            waits.append(time.monotonic() - began)
    assert waits[2] > 1.5
    assert waits[3] > 3.0


def test_attacks_cause_few_log_lines(attacked: Attacked) -> None:
    """The attacks above caused about one line per minute and kind."""
    lines = attacked.server.log.splitlines()
    minutes = 1 + (time.monotonic() - _STARTED) / 60
    assert 1 <= sum("drafter banned" in line for line in lines) <= 1 + minutes
    assert sum("drafter refused" in line for line in lines) <= 2 + 2 * minutes
    assert max(map(len, lines)) < 1000


_STARTED = time.monotonic()
