"""Tests of hostile drafters: lossless output, valid drafters stay connected, memory is bounded."""

from collections.abc import Callable
from functools import cache

import hypothesis.strategies as st
import msgspec
from hypothesis import example, given, settings
from msgspec.structs import replace

from ssd_serve.base.draft_messages import Heartbeat, Message, Open, Outcome, Refusal, Resync
from ssd_serve.base.messages import Abort, SamplingParameters, Submit
from ssd_serve.base.seeds import mix
from ssd_serve.bench.memory_channel import MemoryChannel, memory_pair
from ssd_serve.cache.expansions import ROOT_STEP, Expansion, pack
from ssd_serve.transport.framing import FrameWriter
from ssd_serve.verifier.control.wait import CostBasedWait
from ssd_serve.verifier.engine import Engine
from tests.examples import examples
from tests.fakes import HELLO, VOCABULARY, Case, Output, make_core, make_engine, mixed_requests, run
from tests.verifier.drafter_factory import CoreDrafter

CASE = Case(slots=1024, policy=CostBasedWait)
REQUESTS, TOKENS = 3, 12
NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 2**31, 2**53, 2**63 - 1, 2**64 - 1])
LONG = st.sampled_from(["", "x" * 128, "x" * 129, "\u00e9" * 100, "a\nb", "x" * 200_000])
VALUES = st.sampled_from([-0.1, 0.0, 3e38, -3e38, float("inf"), float("nan")])
FIGURES = st.sampled_from([0.0, 1.0, -1.0, 1e-300, 1e300, float("inf"), float("nan")])
BUFFERS = ("parents", "steps", "counts", "tokens", "log_probabilities")
WRONG_MESSAGES: list[Message] = [
    Abort(1),
    Outcome(1, 1, 1, (1,), 1),
    Open(0, 1, (1,) * 1000, (), SamplingParameters(), 1, 1),
    Submit(1, (1, 2), SamplingParameters(), 1),
]

Known = dict[int, tuple[int, int]]
"""Epoch and root of the requests that a drafter knows."""
Attack = Callable[[Known], bytes]
"""Function from the known requests to the bytes that a drafter sends."""


def framed(*messages: Message) -> bytes:
    writer = FrameWriter()
    return b"".join(bytes(writer.encode(message)) for message in messages)


def raw(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def nested(kind: str, depth: int, lists: bool) -> bytes:
    opening = b"\x91" if lists else b"\x81\xa1k"
    fields = msgspec.msgpack.encode({"type": kind, "protocol": HELLO.protocol})
    return raw(b"\x83" + fields[1:] + b"\xa7unknown" + opening * depth + b"\x00")


@st.composite
def hellos(draw: st.DrawFn) -> bytes:
    optional = {"name": LONG, "source": LONG, "step_ms": FIGURES, "prefill_ms": FIGURES, "noise": LONG}
    change = draw(st.fixed_dictionaries({}, optional={**optional, "instance": NUMBERS}))
    return framed(replace(HELLO, **{"name": "hostile", "source": "hostile", **change}))


@st.composite
def growths(draw: st.DrawFn) -> Attack:
    request, shift = draw(st.integers(0, 5) | NUMBERS), draw(st.sampled_from([0, 0, 0, 1, -1, 2**40]))
    sequence, times = draw(NUMBERS), draw(st.sampled_from([1, 1, 3, 60, 600]))
    width, count = draw(st.sampled_from([0, 1, 5, 39, 300])), draw(st.sampled_from([0, 1, 2, 40, 500]))
    chain, value = draw(st.booleans()), draw(VALUES)
    token, malformed = draw(st.integers(-2, VOCABULARY + 1)), draw(st.sampled_from(["", "", "", *BUFFERS]))
    source, snapshot = draw(LONG), draw(st.booleans())

    def attack(known: Known) -> bytes:
        epoch, parent = known.get(request, (1, 12345))
        expansions: list[Expansion] = []
        step = ROOT_STEP
        for index in range(count):
            tokens = [(token + each) % (VOCABULARY + (token < 0)) for each in range(width)]
            expansions.append(Expansion(parent, step, tokens, [value] * width))
            if chain:
                name = parent if step == ROOT_STEP else mix(parent, step)
                parent, step = name, (tokens[index % width] if width else 1)
        try:
            growth = pack(request, max(0, epoch + shift), sequence, expansions, source, snapshot)
        except OverflowError:  # the value does not fit in 32 bits
            return b""
        if malformed:
            growth = replace(growth, **{malformed: getattr(growth, malformed)[:-1] + b"\xff\xff"})
        return framed(growth) * times

    return attack


@st.composite
def resyncs(draw: st.DrawFn) -> Attack:
    request, shift = draw(st.integers(0, 5) | NUMBERS), draw(st.sampled_from([0, 0, 1]))
    times = draw(st.sampled_from([1, 5, 400]))
    return lambda known: framed(Resync(request, known.get(request, (1, 0))[0] + shift)) * times


def fixed(data: bytes) -> Attack:
    return lambda _known: data


attacks: st.SearchStrategy[Attack] = st.one_of(
    growths(),
    growths(),
    resyncs(),
    st.one_of(
        hellos(),
        st.builds(
            lambda step_ms, nodes, times: framed(Heartbeat(step_ms=step_ms, nodes=nodes)) * times,
            FIGURES,
            NUMBERS | st.just(-1),
            st.sampled_from([1, 30_000]),
        ),
        st.builds(
            nested,
            st.sampled_from(["Hello", "Growth", "Heartbeat"]),
            st.sampled_from([1, 20, 400, 990, 1_500, 20_000]),
            st.booleans(),
        ),
        st.sampled_from(WRONG_MESSAGES).map(framed),
        LONG.map(lambda text: framed(Refusal(text))),
        st.sampled_from(
            [
                b"\xff" * 64,
                (16 << 20).to_bytes(4, "little") + b"half a frame",
                raw(b""),
                raw(b"\x81\xa4type\xa6Growth"),
                raw(b"\x82\xa4type\xa6Growth\xa6tokens\xdd\xff\xff\xff\xff"),
            ]
        ),
    ).map(fixed),
)


@cache
def plain() -> dict[int, Output]:
    engine, _ = make_engine(Case(drafter="none", slots=1024))
    return run(engine, mixed_requests(REQUESTS, TOKENS))


class HostileDrafter:
    """Drafter that sends some attacks a step, and reconnects from a new address when disconnected."""

    def __init__(self, engine: Engine, attacks: list[Attack], source: str) -> None:
        self._engine = engine
        self._attacks = attacks
        self._hello = replace(HELLO, name="hostile", source=source)
        self._connections = 0
        self._its: MemoryChannel | None = None
        self._known: Known = {}

    def attack(self, count: int) -> None:
        if self._its is None or self._its.closed:
            mine, self._its = memory_pair(capacity=100_000)
            self._engine.drafters.admit(mine, f"10.0.0.{self._connections}", remote=True)
            self._connections += 1
            self._its.send(self._hello)
        for message in self._its.receive():
            if isinstance(message, Open | Outcome):
                self._known[message.request] = message.epoch, message.root
        for _ in range(min(count, len(self._attacks))):
            self._its.send_raw(self._attacks.pop()(self._known))


def tree_sizes(engine: Engine) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for request in engine._active.values():  # pyright: ignore[reportPrivateUsage]
        if request.replica is not None:
            orphans = request.replica._orphans.values()  # pyright: ignore[reportPrivateUsage]
            found.append(
                (len(request.replica.tree), sum(each.expansion.size for some in orphans for each in some))
            )
    return found


@given(st.lists(attacks, max_size=16), st.integers(1, 6), st.sampled_from(["hostile", HELLO.source]))
@settings(max_examples=examples(60), deadline=None)
@example([fixed(b"\xff" * 64)] * 8, 1, HELLO.source)
def test_output_is_lossless_with_malformed_drafter_messages(
    attacks: list[Attack], count: int, source: str
) -> None:
    engine, _ = make_engine(CASE)
    valid, hostile = CoreDrafter(engine, make_core(CASE)), HostileDrafter(engine, list(attacks), source)
    limit = CASE.growth.nodes

    def each(_step: int) -> None:
        hostile.attack(count)
        valid.work()
        assert all(tree <= limit and orphans <= limit for tree, orphans in tree_sizes(engine))
        assert not valid.its.closed

    outputs = run(engine, mixed_requests(REQUESTS, TOKENS), each)
    texts = {number: (output.tokens, output.reason) for number, output in outputs.items()}
    assert texts == {number: (output.tokens, output.reason) for number, output in plain().items()}
    engine.drain()
    assert HELLO.name in engine.drafters.num_requests
    assert len(engine.drafters.channels) <= 3
