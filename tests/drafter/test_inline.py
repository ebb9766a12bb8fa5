"""The inline drafter: one draft step whenever the verifier waits."""

from ssd_serve.base.draft_messages import (
    Growth,
    Heartbeat,
    Open,
    Outcome,
    Resync,
)
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.inline import InlineChannel
from ssd_serve.drafter.sources.whole_model import DraftModel
from ssd_serve.sampling.noise_rows import NoiseRows
from tests.fakes import HELLO, VOCABULARY, FakeModel, ScriptedSource, core_of

LIMITS = GrowthLimits(width=3, fan_out=3, depth=3, nodes=60)
OPEN = Open(1, 1, (5, 6), (), SamplingParameters(max_tokens=9), 0, root=1)


def make() -> InlineChannel:
    return InlineChannel(core_of(ScriptedSource(), LIMITS), HELLO)


def test_one_wait_runs_one_draft_step() -> None:
    channel = make()
    channel.receive()
    channel.send(OPEN)
    steps = 0
    while channel.wait(0.001):
        growth, beat = channel.receive()
        assert isinstance(growth, Growth)
        assert growth.sequence == steps
        assert isinstance(beat, Heartbeat)
        assert beat.step_ms > 0
        steps += 1
    assert steps == channel.steps > 1
    assert channel.receive() == []


def test_warmup_steps_do_not_count_in_the_step_time() -> None:
    source, clock = ScriptedSource(), iter(range(100))
    channel = InlineChannel(core_of(source, LIMITS), HELLO, lambda: float(next(clock)))
    channel.receive()
    channel.send(OPEN)

    def told() -> float:
        assert channel.wait(0.001)
        _, beat = channel.receive()
        assert isinstance(beat, Heartbeat)
        return beat.step_ms

    source.is_warmup_step = True
    assert told() == HELLO.step_ms
    source.is_warmup_step = False
    assert told() > HELLO.step_ms


def test_one_wait_completes_a_long_prefill() -> None:
    source = DraftModel(FakeModel(300), 300, NoiseRows(VOCABULARY, 64), prefill_rows=20)
    channel = InlineChannel(core_of(source, LIMITS), HELLO)
    channel.receive()
    channel.send(Open(1, 1, tuple([5] * 70), (), OPEN.parameters, 9, OPEN.root))
    assert channel.wait(0.001)
    growth, _ = channel.receive()
    assert isinstance(growth, Growth)


def test_wait_returns_at_once_if_messages_are_waiting() -> None:
    channel = make()
    channel.send(OPEN)
    assert channel.wait(0.001)
    assert channel.steps == 0


def test_send_processes_messages_at_once() -> None:
    channel = make()
    channel.receive()
    channel.send(Outcome(1, 1, 2, (4,), 0))
    assert channel.receive() == [Resync(1, 1)]
    assert channel.pending == 0
    assert channel.flush()
    assert channel.fileno() < 0
