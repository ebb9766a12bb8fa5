"""The drafter's loop, at the ends of deterministic channels."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from ssd_serve.base.draft_messages import (
    Close,
    Growth,
    Heartbeat,
    Hello,
    Message,
    Open,
    Outcome,
    Pause,
    Refusal,
    Resync,
)
from ssd_serve.base.errors import EngineDeadError, PairMismatchError
from ssd_serve.base.logs import get_logger
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.bench.memory_channel import MemoryChannel, memory_pair
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.process import DrafterLoop, DrafterRunner
from ssd_serve.drafter.verifier_connection import VerifierConnection
from ssd_serve.transport.channel import Channel
from ssd_serve.transport.listener import Reconnector
from tests.fakes import HELLO, VOCABULARY, ScriptedSource, core_of

QUIET = get_logger("drafter-0", level="error")
LIMITS = GrowthLimits(width=3, fan_out=3, depth=3, nodes=60)
OPEN = Open(1, 1, (5, 6), (), SamplingParameters(max_tokens=9), 0, root=1)


def make() -> tuple[DrafterLoop, DrafterCore, MemoryChannel, MemoryChannel]:
    mine, verifiers = memory_pair()
    core = core_of(ScriptedSource(), LIMITS)
    return (
        DrafterLoop([DrafterRunner(core, [VerifierConnection(core, HELLO, QUIET, channel=mine)], 0.001)]),
        core,
        mine,
        verifiers,
    )


def test_the_drafter_publishes_growth_and_ends_with_its_verifier() -> None:
    loop, _, mine, verifiers = make()
    verifiers.send(OPEN)
    slept: list[int] = []

    def asleep() -> None:
        slept.append(1)
        verifiers.close()

    mine.on_wait = asleep
    loop.run()
    received = verifiers.receive()
    assert slept == [1]
    sequences = [message.sequence for message in received if isinstance(message, Growth)]
    assert sequences == list(range(len(sequences)))
    assert len(sequences) > 1
    assert any(isinstance(message, Heartbeat) for message in received)


def test_several_draft_models_in_one_process_alternate() -> None:
    pairs = [memory_pair() for _ in range(2)]
    cores = [core_of(ScriptedSource(), LIMITS) for _ in pairs]
    works = [
        DrafterRunner(core, [VerifierConnection(core, HELLO, QUIET, channel=mine)], 0.001)
        for core, (mine, _) in zip(cores, pairs, strict=True)
    ]
    loop = DrafterLoop(works)
    for _, verifier in pairs:
        verifier.send(OPEN)
    loop.turn()
    for _, verifier in pairs:
        received = verifier.receive()
        assert [type(message) for message in received if not isinstance(message, Heartbeat)] == [
            Hello,
            Growth,
        ]
    pairs[0][1].send(Close(1, 1))
    loop.turn()
    assert [len(core.requests) for core in cores] == [0, 1]
    pairs[1][1].send(Refusal("no"))
    with pytest.raises(PairMismatchError, match="no"):
        loop.turn()


def test_close_frees_the_request() -> None:
    loop, core, mine, verifiers = make()
    for message in (OPEN, Close(1, 1)):
        verifiers.send(message)
    mine.on_wait = verifiers.close
    loop.run()
    assert not core.requests
    assert not any(isinstance(message, Growth) for message in verifiers.receive())


def test_a_refusal_ends_the_drafter_with_the_reason() -> None:
    loop, _, _, verifiers = make()
    verifiers.send(Refusal("another tokenizer"))
    with pytest.raises(PairMismatchError, match="another tokenizer"):
        loop.run()


def test_the_drafter_refuses_another_protocol_version() -> None:
    loop, _, _, verifiers = make()
    verifiers.send(replace(HELLO, protocol=999))
    with pytest.raises(PairMismatchError, match=f"verifier 999, drafter {HELLO.protocol}.*same version"):
        loop.run()
    assert verifiers.closed


def test_a_patient_drafter_reconnects_after_a_refusal() -> None:
    """A server of another version, and then its successor at the same address."""
    reached: list[MemoryChannel] = []

    def reach(_address: str) -> Channel:
        mine, verifiers = memory_pair()
        reached.append(verifiers)
        verifiers.send(Refusal("protocol versions differ") if len(reached) == 1 else HELLO)
        return mine

    core = core_of(ScriptedSource(), LIMITS)
    target = VerifierConnection(
        core, HELLO, QUIET, dial=Reconnector("tcp://a:1", QUIET, reach, longest_pause_s=0.01)
    )
    loop = DrafterLoop([DrafterRunner(core, [target], 0.001)], patient=True)
    deadline = time.monotonic() + 10.0
    while len(reached) < 2 or target.refused:
        assert time.monotonic() < deadline
        loop.turn()
    assert [type(each) for each in reached[1].receive()] == [Hello]


class Shared:
    def __init__(self) -> None:
        self.core = core_of(ScriptedSource(), LIMITS)
        pairs = [memory_pair() for _ in range(2)]
        self.verifiers = [pair[1] for pair in pairs]
        targets = [
            VerifierConnection(self.core, HELLO, QUIET, (place, 2), channel=pair[0])
            for place, pair in enumerate(pairs)
        ]
        self.loop = DrafterLoop([DrafterRunner(self.core, targets, 0.001)])

    def turn(self, times: int = 1) -> list[list[Growth]]:
        for _ in range(times):
            self.loop.turn()
        return [[each for each in its.receive() if isinstance(each, Growth)] for its in self.verifiers]


def test_two_verifiers_may_use_the_same_request_number() -> None:
    shared = Shared()
    shared.verifiers[0].send(Open(1, 1, (5, 6), (), SamplingParameters(max_tokens=9), 0, root=10))
    shared.verifiers[1].send(Open(1, 4, (7, 8), (), SamplingParameters(max_tokens=9), 0, root=20))
    first, second = shared.turn(4)
    assert {(each.request, each.epoch) for each in first} == {(1, 1)}
    assert {(each.request, each.epoch) for each in second} == {(1, 4)}
    assert first[0].parents == (10).to_bytes(8, "little")
    assert second[0].parents == (20).to_bytes(8, "little")
    shared.verifiers[1].send(Outcome(1, 4, 5, (3,), 99))  # a gap
    shared.loop.turn()
    assert [each for each in shared.verifiers[1].receive() if isinstance(each, Resync)] == [Resync(1, 4)]
    shared.verifiers[0].send(Close(1, 1))
    shared.turn()
    assert list(shared.core.requests) == [3]


def test_a_pause_affects_only_its_verifier() -> None:
    shared = Shared()
    shared.verifiers[0].send(Pause(True))
    shared.verifiers[0].send(OPEN)
    shared.verifiers[1].send(OPEN)
    first, second = shared.turn(3)
    assert len(first) == 1  # the root is read, so that it can go on at once
    assert len(second) == 3
    shared.verifiers[0].send(Pause(False))
    first, _ = shared.turn(3)
    assert first


def test_a_disconnected_verifier_frees_only_its_requests() -> None:
    shared = Shared()
    for its in shared.verifiers:
        its.send(OPEN)
    shared.turn()
    shared.verifiers[0].close()
    _, second = shared.turn(3)
    assert second
    assert list(shared.core.requests) == [3]


def test_a_refusal_by_one_verifier_does_not_end_the_drafter() -> None:
    shared = Shared()
    shared.verifiers[0].send(Refusal("another tokenizer"))
    shared.verifiers[0].close()
    shared.verifiers[1].send(OPEN)
    assert shared.turn(2)[1]
    shared.verifiers[1].send(Refusal("another vocabulary"))
    with pytest.raises(PairMismatchError, match="another tokenizer"):
        shared.loop.turn()


def test_a_reconnected_verifier_gets_hello_again() -> None:
    ends: list[MemoryChannel] = []

    def reach(_address: str) -> Channel:
        if len(ends) == 1 and not ends[0].closed:
            raise EngineDeadError("no verifier listens")
        mine, its = memory_pair()
        ends.append(its)
        return mine

    core = core_of(ScriptedSource(), LIMITS)
    target = VerifierConnection(core, HELLO, QUIET, dial=Reconnector("here", QUIET, reach))
    loop = DrafterLoop([DrafterRunner(core, [target], 0.001)])
    until(loop, lambda: len(ends) == 1)
    ends[0].send(HELLO)
    ends[0].send(OPEN)
    until(loop, lambda: bool(core.requests))
    ends[0].close()
    until(loop, lambda: not core.requests)
    until(loop, lambda: len(ends) == 2)
    until(loop, lambda: any(isinstance(each, Hello) for each in ends[1].receive()))


def until(loop: DrafterLoop, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        loop.turn()


def test_the_alive_file_is_touched_while_a_verifier_accepts_drafts(tmp_path: Path) -> None:
    alive = tmp_path / "alive"

    def touched(*messages: Message) -> bool:
        mine, verifiers = memory_pair()
        core = core_of(ScriptedSource(), LIMITS)
        loop = DrafterLoop(
            [DrafterRunner(core, [VerifierConnection(core, HELLO, QUIET, channel=mine)], 0.001)],
            patient=True,
            alive_file=alive,
        )
        alive.unlink(missing_ok=True)
        for message in messages:
            verifiers.send(message)
        mine.on_wait = lambda: None
        loop.turn()
        return alive.exists()

    assert touched(HELLO)
    assert not touched(), "no verifier has replied"
    assert not touched(Refusal("another tokenizer"))


DEEP = b"\x82\xa4type\xa5Pause\xa7unknown" + b"\x91" * 2_000 + b"\x00"
IMPOSSIBLE: dict[str, Message] = {
    "a number": Open(2**60, 1, (1, 2), (), SamplingParameters(), 1, 1),
    "an epoch": Outcome(1, 2**63, 1, (1,), 1),
    "no prompt": Open(1, 1, (), (), SamplingParameters(), 1, 1),
    "a temperature": Open(1, 1, (1, 2), (), SamplingParameters(temperature=float("nan")), 1, 1),
    "a seed": Open(1, 1, (1, 2), (), SamplingParameters(), -1, 1),
}


@pytest.mark.parametrize("words", [*IMPOSSIBLE.values(), DEEP], ids=[*IMPOSSIBLE, "a deep frame"])
def test_a_protocol_error_disconnects_only_that_verifier(words: Message | bytes) -> None:
    shared = Shared()
    bad, good = shared.verifiers
    good.send(Open(1, 1, (1, 2, 3), (), SamplingParameters(max_tokens=20), 5, 77))
    if isinstance(words, bytes):
        bad.send_raw(len(words).to_bytes(4, "little") + words)
    else:
        bad.send(words)
    for _ in range(3):
        shared.loop.turn()
    assert bad.closed
    assert not good.closed
    assert any(isinstance(each, Growth) for each in good.receive())


def test_tokens_outside_the_draft_vocabulary_are_not_drafted() -> None:
    shared = Shared()
    verifier = shared.verifiers[0]
    for number, token in enumerate((VOCABULARY, -1, 3)):
        verifier.send(Open(number, 1, (1, token), (), SamplingParameters(max_tokens=20), 5, 77))
    shared.loop.turn()
    assert {number // 2 for number in shared.core.requests} == {2}
    verifier.send(Outcome(2, 1, 2, (VOCABULARY,), 5))
    shared.loop.turn()
    assert not shared.core.requests
    assert not verifier.closed


def test_a_later_refusal_of_a_joined_drafter_is_retried() -> None:
    """The reason may pass: a process that is no patient one does not end for it."""
    mine, verifiers = memory_pair()
    core = core_of(ScriptedSource(), LIMITS)
    target = VerifierConnection(core, HELLO, QUIET, dial=Reconnector("here", QUIET, lambda _address: mine))
    loop = DrafterLoop([DrafterRunner(core, [target], 0.001)])
    deadline = time.monotonic() + 10.0
    while target.channel is None:
        assert time.monotonic() < deadline
        loop.turn()
    verifiers.send(HELLO)
    loop.turn()
    verifiers.send(Refusal("it breaks a rule"))
    loop.turn()
    assert not target.refused
    assert verifiers.closed
    loop.turn()
