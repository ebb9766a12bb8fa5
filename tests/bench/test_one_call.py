"""Several draft steps in one call: the same drafts as step by step, and forwards one behind the other."""

from ssd_serve.base.draft_messages import Growth, Open
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.bench.device_tables import Flat
from ssd_serve.bench.emulated import EmulatedModel
from ssd_serve.bench.rig import OneCallChannel, QueuedModel
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.inline import InlineChannel
from tests.bench.test_emulated import SpentTime, one_row
from tests.fakes import HELLO, FakeModel, ScriptedSource, core_of

LIMITS = GrowthLimits(width=1, fan_out=3, depth=3, nodes=60)
OPEN = Open(1, 1, (5, 6), (), SamplingParameters(max_tokens=9), 0, root=1)


def growth(channel: InlineChannel, waits: int) -> list[Growth]:
    channel.receive()
    channel.send(OPEN)
    found: list[Growth] = []
    for _ in range(waits):
        assert channel.wait(0.0)
        found += [message for message in channel.receive() if isinstance(message, Growth)]
    return found


def test_one_call_drafts_what_as_many_steps_do() -> None:
    by_step = InlineChannel(core_of(ScriptedSource(), LIMITS), HELLO)
    at_once = OneCallChannel(core_of(ScriptedSource(), LIMITS), HELLO, 3, QueuedModel(FakeModel(16)))
    found = growth(at_once, 1)
    assert len(found) == 3
    assert found == growth(by_step, 3)
    assert (at_once.steps, by_step.steps) == (1, 3)


def test_forwards_queue_on_the_device_and_are_waited_for_once() -> None:
    time = SpentTime()
    device = EmulatedModel(FakeModel(16), Flat(0.05), clock=time, sleep=time.sleep)
    queued = QueuedModel(device)
    for _ in range(3):
        time.now += 0.02  # what the host does between them is hidden
        assert queued.forward(one_row()).completion.ready()
    assert 0.06 < time.now < 0.061
    queued.wait()
    assert 0.17 <= time.now < 0.1701
    assert device.overruns == 0
