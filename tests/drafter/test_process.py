"""The drafter's loop, at the end of a deterministic channel."""

import pytest

from ssd_serve.cluster.memory_channel import MemoryChannel, memory_pair
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.process import Loop
from ssd_serve.errors import PairMismatchError
from ssd_serve.messages import Close, Growth, Heartbeat, Open, Refusal, SamplingParameters
from tests.fakes import EOS, ScriptedSource

LIMITS = GrowthLimits(width=3, fan_out=3, depth=3, nodes=60)
OPEN = Open(1, 1, (5, 6), (), SamplingParameters(max_tokens=9), 0, root=1)


def make() -> tuple[Loop, DrafterCore, MemoryChannel, MemoryChannel]:
    mine, verifiers = memory_pair()
    core = DrafterCore(ScriptedSource(), LIMITS, frozenset((EOS,)), "d0")
    return Loop(mine, core, 0.001), core, mine, verifiers


def test_it_publishes_growth_then_sleeps_on_its_socket_until_the_verifier_leaves() -> None:
    loop, _, mine, verifiers = make()
    verifiers.send(OPEN)
    slept: list[int] = []

    def asleep() -> None:
        slept.append(1)
        verifiers.close()

    mine.on_wait = asleep
    loop.run()
    heard = verifiers.receive()
    assert slept == [1]
    sequences = [message.sequence for message in heard if isinstance(message, Growth)]
    assert sequences == list(range(len(sequences)))
    assert len(sequences) > 1
    assert any(isinstance(message, Heartbeat) for message in heard)


def test_it_drops_what_is_closed() -> None:
    loop, core, mine, verifiers = make()
    for message in (OPEN, Close(1, 1)):
        verifiers.send(message)
    mine.on_wait = verifiers.close
    loop.run()
    assert core.requests == 0
    assert not any(isinstance(message, Growth) for message in verifiers.receive())


def test_a_refusal_ends_it_with_the_reason() -> None:
    loop, _, _, verifiers = make()
    verifiers.send(Refusal("another tokenizer"))
    with pytest.raises(PairMismatchError, match="another tokenizer"):
        loop.run()
