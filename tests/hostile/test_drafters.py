"""Drafters that know the key and misuse it: the stream of another client goes on, from the same target."""

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
from ssd_serve.base.errors import ProtocolError
from ssd_serve.base.messages import Abort
from ssd_serve.cache.expansions import ROOT_STEP, Expansion, pack
from ssd_serve.models.hub import resolve_model
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.transport.channel import SocketChannel
from ssd_serve.transport.framing import FrameWriter
from ssd_serve.transport.handshake import introduce
from ssd_serve.transport.tls import identity
from tests.hostile.target_server import TargetServer, start_target_server
from tests.servers import free_port

KEY = "the key of these tests, and of nobody else"


class Stranger:
    """One who knows the key, at an address of its own."""

    def __init__(self, port: int, address: str, hello: Hello) -> None:
        connection = socket.create_connection(("127.0.0.1", port), 30.0, source_address=(address, 0))
        deadline = time.monotonic() + 30.0
        self.channel = SocketChannel(
            connection, sealed=introduce(connection, identity(KEY), address, deadline, lambda: False)
        )
        self.hello = hello
        self.heard: list[Message] = []

    def say(self, *messages: Message) -> None:
        writer = FrameWriter()
        self.say_bytes(b"".join(bytes(writer.encode(message)) for message in messages))

    def say_bytes(self, data: bytes) -> None:
        """As they are; until they are taken, or this one is hung up on."""
        sealed = self.channel._sealed  # pyright: ignore[reportPrivateUsage]
        assert sealed is not None
        self.channel._outgoing += sealed.seal(data)  # pyright: ignore[reportPrivateUsage]
        deadline = time.monotonic() + 20.0
        while not self.channel.flush() and not self.channel.closed and time.monotonic() < deadline:
            self.hear()
            time.sleep(0.002)

    def hear(self) -> None:
        with contextlib.suppress(ProtocolError):
            self.heard += self.channel.receive()

    def await_end(self, seconds: float = 30.0) -> bool:
        """Until it is hung up on."""
        deadline = time.monotonic() + seconds
        while not self.channel.closed and time.monotonic() < deadline:
            self.channel.wait(0.1)
            self.hear()
        return self.channel.closed

    def join(self, seconds: float = 30.0) -> None:
        """As any drafter does."""
        self.say(self.hello)
        deadline = time.monotonic() + seconds
        while not any(isinstance(each, Hello) for each in self.heard):
            assert time.monotonic() < deadline
            assert not self.channel.closed, self.heard
            self.channel.wait(0.1)
            self.hear()

    def roots(self, seconds: float = 30.0) -> dict[int, Open | Outcome]:
        """Where its requests stand; waits until it has one."""
        deadline = time.monotonic() + seconds
        while True:
            self.hear()
            stands = {each.request: each for each in self.heard if isinstance(each, Open | Outcome)}
            if stands or self.channel.closed:
                return stands
            assert time.monotonic() < deadline
            self.say(Heartbeat(step_ms=self.hello.step_ms))  # who is silent for a second gets no request
            self.channel.wait(0.1)


class Attacked:
    """A server with a drafter of its own, and a port for others."""

    def __init__(self, server: TargetServer, port: int, hello: Hello) -> None:
        self.server = server
        self.port = port
        self._hello = hello
        self._numbers = itertools.count(2)

    @contextlib.contextmanager
    def stranger(self, address: str = "", change: Mapping[str, object] | None = None) -> Generator[Stranger]:
        """It says a `Hello` that differs from a good one in the fields of `change`."""
        number = next(self._numbers)
        hello = replace(self._hello, **{"name": f"stranger-{number}", **(change or {})})
        stranger = Stranger(self.port, address or f"127.0.{1 + number // 200}.{1 + number % 200}", hello)
        try:
            yield stranger
        finally:
            stranger.channel.close()

    def drafters(self) -> dict[str, float]:
        """Requests of each that has joined, by name."""
        page = httpx.get(f"{self.server.url}/metrics", timeout=30.0).text
        lines = [line for line in page.splitlines() if line.startswith("ssd_drafter_requests{")]
        return {line.split('"')[1]: float(line.split()[-1]) for line in lines}

    @contextlib.contextmanager
    def unharmed(self) -> Generator[None]:
        """And its own drafter has stayed."""
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
    """It gives requests to drafters also when it has learned from attacks that plain decoding is faster."""
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


WORDS = {
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


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS.keys())
def test_who_has_joined_and_breaks_a_rule_is_hung_up_on(attacked: Attacked, words: bytes) -> None:
    with attacked.unharmed(), attacked.stranger() as stranger:
        stranger.join()
        stranger.say_bytes(words)
        assert stranger.await_end()


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


@pytest.mark.parametrize("change", HELLOS.values(), ids=HELLOS.keys())
def test_an_impossible_hello_is_refused_in_words(attacked: Attacked, change: dict[str, object]) -> None:
    with attacked.unharmed(), attacked.stranger(change=change) as stranger:
        stranger.say(stranger.hello)
        assert stranger.await_end()
        (refusal,) = stranger.heard
        assert isinstance(refusal, Refusal)
        assert 0 < len(refusal.message) <= 200
    assert "x" * 1000 not in attacked.server.log
    assert "\nverifier: all is well" not in attacked.server.log


def test_a_deep_frame_instead_of_a_hello_is_hung_up_on(attacked: Attacked) -> None:
    with attacked.unharmed(), attacked.stranger() as stranger:
        stranger.say_bytes(deep("Hello", 5_000))
        assert stranger.await_end()


def test_half_a_frame_keeps_nobody_waiting(attacked: Attacked) -> None:
    with attacked.unharmed(), attacked.stranger() as stranger, attacked.stranger() as leaving:
        for each in (stranger, leaving):
            each.join()
            each.say_bytes((1 << 20).to_bytes(4, "little") + bytes(1 << 19))
        leaving.channel.close()
        time.sleep(1.0)
        assert not stranger.channel.closed


Flood = Callable[[int, Open | Outcome], bytes]


def _orphans(request: int, stand: Open | Outcome) -> bytes:
    """Expansions whose nodes nobody knows, in messages of a megabyte."""
    many = [Expansion(number, 1, [1, 2], [-1.0, -2.0]) for number in range(30_000)]
    return frames(grown(*many, request=request, epoch=stand.epoch)) * 8


def _merges(request: int, stand: Open | Outcome) -> bytes:
    """A wide root, named again and again."""
    wide = Expansion(stand.root, ROOT_STEP, list(range(1000)), [-9.0] * 1000)
    again = [Expansion(stand.root, ROOT_STEP, [token], [-1.0]) for token in range(1000)]
    return frames(*[grown(wide, *again, request=request, epoch=stand.epoch)] * 40)


def _sources(request: int, stand: Open | Outcome) -> bytes:
    """Another name for itself in every message."""
    root = Expansion(stand.root, ROOT_STEP, [5], [-1.0])
    return frames(
        *[grown(root, request=request, epoch=stand.epoch, source=f"{n}" * 20_000) for n in range(300)]
    )


def _lies(request: int, stand: Open | Outcome) -> bytes:
    """Guesses that are surely wrong, said to be certain."""
    root = Expansion(stand.root, ROOT_STEP, list(range(64)), [0.0] * 64)
    return frames(*[grown(root, request=request, epoch=stand.epoch)] * 2_000)


@pytest.mark.parametrize("flood", [_orphans, _merges, _sources, _lies])
def test_a_flood_of_growth_holds_up_no_round(attacked: Attacked, flood: Flood) -> None:
    with attacked.unharmed(), attacked.stranger(change={"step_ms": 0.01}) as stranger:
        stranger.join()
        for request, stand in stranger.roots().items():
            stranger.say_bytes(flood(request, stand))
        time.sleep(1.0)


def test_who_says_nothing_is_hung_up_on_and_takes_nobodys_place(attacked: Attacked) -> None:
    with attacked.unharmed(), contextlib.ExitStack() as stack:
        silent = [stack.enter_context(attacked.stranger("127.0.0.77")) for _ in range(40)]
        with attacked.stranger() as honest:
            honest.join()
        assert all(stranger.await_end(40.0) for stranger in silent)


def test_who_was_hung_up_on_is_kept_out_for_longer_and_longer(attacked: Attacked) -> None:
    with attacked.unharmed():
        waits: list[float] = []
        for _ in range(4):
            began = time.monotonic()
            while True:
                with (
                    contextlib.suppress(OSError, AssertionError),
                    attacked.stranger("127.0.0.79") as stranger,
                ):
                    stranger.join(5.0)
                    stranger.say(Heartbeat(step_ms=-1.0))
                    assert stranger.await_end()
                    break
                time.sleep(0.05)
            waits.append(time.monotonic() - began)
    assert waits[2] > 1.5
    assert waits[3] > 3.0


def test_what_strangers_do_is_logged_sparingly(attacked: Attacked) -> None:
    """After all of the above there was one line a minute and kind, and never a long one."""
    lines = attacked.server.log.splitlines()
    minutes = 1 + (time.monotonic() - _STARTED) / 60
    assert 1 <= sum("drafter banned" in line for line in lines) <= 1 + minutes
    assert sum("drafter refused" in line for line in lines) <= 2 + 2 * minutes
    assert max(map(len, lines)) < 1000


_STARTED = time.monotonic()
