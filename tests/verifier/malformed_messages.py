"""Strategies for messages of hostile drafters: deeply nested, long, wide, valid and nearly valid."""

from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis.strategies as st
import msgspec
from msgspec.structs import replace

from ssd_serve.base.draft_messages import (
    Close,
    Heartbeat,
    Message,
    Open,
    Outcome,
    Pause,
    Refusal,
    Resync,
)
from ssd_serve.base.messages import Abort, SamplingParameters, Submit
from ssd_serve.base.seeds import mix
from ssd_serve.cache.expansions import ROOT_STEP, Expansion, pack
from ssd_serve.transport.framing import FrameWriter
from tests.fakes import HELLO, VOCABULARY

NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 2**31, 2**53, 2**63 - 1, 2**64 - 1])
DEPTHS = st.sampled_from([1, 20, 400, 990, 1_500, 20_000])
KINDS = st.sampled_from(["Hello", "Growth", "Heartbeat"])
LONG = st.sampled_from(["", "x" * 128, "x" * 129, "\u00e9" * 100, "a\nb", "x" * 200_000])
VALUES = st.sampled_from([-0.1, 0.0, 3e38, -3e38, float("inf"), float("nan")])
FIGURES = st.sampled_from([0.0, 1.0, -1.0, 1e-300, 1e300, float("inf"), float("nan")])


@dataclass
class Heard:
    epochs: dict[int, int] = field(default_factory=dict[int, int])
    roots: dict[int, int] = field(default_factory=dict[int, int])

    def hear(self, message: Message) -> None:
        if isinstance(message, Open | Outcome):
            self.epochs[message.request], self.roots[message.request] = message.epoch, message.root

    def stand(self, request: int) -> tuple[int, int]:
        return self.epochs.get(request, 1), self.roots.get(request, 12345)


Speech = Callable[[Heard], bytes]
"""Function from the requests that a drafter knows to the bytes that it sends."""


def framed(*messages: Message) -> bytes:
    writer = FrameWriter()
    return b"".join(bytes(writer.encode(message)) for message in messages)


def raw(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def _deep(kind: str, depth: int, lists: bool) -> bytes:
    opening = b"\x91" if lists else b"\x81\xa1k"
    fields = msgspec.msgpack.encode({"type": kind, "protocol": HELLO.protocol})
    return raw(b"\x83" + fields[1:] + b"\xa7unknown" + opening * depth + b"\x00")


@st.composite
def hellos(draw: st.DrawFn) -> Speech:
    change = draw(
        st.fixed_dictionaries(
            {},
            optional={
                **{"name": LONG, "source": LONG, "step_ms": FIGURES, "prefill_ms": FIGURES},
                **{"instance": NUMBERS, "noise": LONG},
            },
        )
    )
    return lambda _heard: framed(replace(HELLO, **{"name": "hostile", "source": "hostile", **change}))


@st.composite
def growths(draw: st.DrawFn) -> Speech:
    request, shift = draw(st.integers(0, 5) | NUMBERS), draw(st.sampled_from([0, 0, 0, 1, -1, 2**40]))
    sequence, times = draw(NUMBERS), draw(st.sampled_from([1, 1, 3, 60, 600]))
    all_cores, count = draw(st.sampled_from([0, 1, 5, 39, 300])), draw(st.sampled_from([0, 1, 2, 40, 500]))
    chain, value = draw(st.booleans()), draw(VALUES)
    token, spoil = draw(st.integers(-2, VOCABULARY + 1)), draw(st.sampled_from(["", "", "", *_BUFFERS]))
    source, snapshot = draw(LONG), draw(st.booleans())

    def speak(heard: Heard) -> bytes:
        epoch, root = heard.stand(request)
        expansions: list[Expansion] = []
        parent, step = root, ROOT_STEP
        for index in range(count):
            tokens = [(token + each) % (VOCABULARY + (token < 0)) for each in range(all_cores)]
            expansions.append(Expansion(parent, step, tokens, [value] * all_cores))
            if chain:
                name = parent if step == ROOT_STEP else mix(parent, step)
                parent, step = name, (tokens[index % all_cores] if all_cores else 1)
        try:
            growth = pack(request, max(0, epoch + shift), sequence, expansions, source, snapshot)
        except OverflowError:  # the value does not fit in 32 bits
            return b""
        if spoil:
            growth = replace(growth, **{spoil: getattr(growth, spoil)[:-1] + b"\xff\xff"})
        return framed(growth) * times

    return speak


_BUFFERS = ("parents", "steps", "counts", "tokens", "log_probabilities")


@st.composite
def resyncs(draw: st.DrawFn) -> Speech:
    request, shift = draw(st.integers(0, 5) | NUMBERS), draw(st.sampled_from([0, 0, 1]))
    times = draw(st.sampled_from([1, 5, 400]))
    return lambda heard: framed(Resync(request, heard.stand(request)[0] + shift)) * times


@st.composite
def beats(draw: st.DrawFn) -> Speech:
    beat = Heartbeat(step_ms=draw(FIGURES), nodes=draw(NUMBERS | st.just(-1)))
    times = draw(st.sampled_from([1, 30_000]))
    return lambda _heard: framed(beat) * times


NOT_FOR_DRAFTERS: list[Message] = [
    Abort(1),
    Close(1, 1),
    Pause(True),
    Outcome(1, 1, 1, (1,), 1),
    Open(0, 1, (1,) * 1000, (), SamplingParameters(), 1, 1),
    Submit(1, (1, 2), SamplingParameters(), 1),
]
NONSENSE = [
    b"\xff" * 64,
    (16 << 20).to_bytes(4, "little") + b"half a frame",
    (2**32 - 1).to_bytes(4, "little"),
    raw(b""),
    raw(b"\xc1"),
    raw(b"\x81\xa4type\xa6Growth"),
    raw(b"\x82\xa4type\xa6Growth\xa6tokens\xdd\xff\xff\xff\xff"),
]


def constantly(data: bytes) -> Speech:
    return lambda _heard: data


speeches: st.SearchStrategy[Speech] = st.one_of(
    hellos(),
    growths(),
    growths(),
    growths(),
    resyncs(),
    beats(),
    st.builds(_deep, st.sampled_from(["Hello", "Growth", "Heartbeat"]), DEPTHS, st.booleans()).map(
        constantly
    ),
    st.sampled_from(NOT_FOR_DRAFTERS).map(lambda message: constantly(framed(message))),
    st.sampled_from(NONSENSE).map(constantly),
    LONG.map(lambda text: constantly(framed(Refusal(text)))),
)
joining: Speech = constantly(framed(replace(HELLO, name="hostile", source="hostile")))
sharing: Speech = constantly(framed(replace(HELLO, name="hostile", source=HELLO.source)))
