"""Tests of emulated devices: device tables, and forwards that are ready at their time and not earlier."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from ssd_serve.app.plan.devices import Forward
from ssd_serve.base.draft_messages import Growth, Open
from ssd_serve.base.errors import SettingsError
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.base.settings import Settings
from ssd_serve.bench.emulated import (
    EmulatedModel,
    device_table,
    emulated_table,
    emulating,
    forward_of,
    overrun_share,
)
from ssd_serve.bench.rig import OneCallChannel, QueuedModel
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.inline import InlineChannel
from ssd_serve.kernels.batch import Batch, RequestRows, build_batch
from ssd_serve.models.wrapped import wrap_model
from tests.fakes import HELLO, FakeModel, ScriptedSource, core_of

ONE = Forward.of_one(1, 384)
LIMITS = GrowthLimits(width=1, fan_out=3, depth=3, nodes=60)


def ms(name: str, forward: Forward) -> float:
    return 1e3 * device_table(name).target(forward)


def test_mi300x_tables_have_the_published_speeds() -> None:
    """52.32 tokens/s on 4 devices, 32.87 on 2."""
    assert ms("mi300x-70b-1b", ONE) == pytest.approx(1000 / 52.32, rel=0.005)
    assert ms("mi300x-70b-1b-tp2", ONE) == pytest.approx(1000 / 32.87, rel=0.005)
    assert ms("mi300x-70b-1b", Forward.of_one(36, 384)) > 1.2 * ms("mi300x-70b-1b", ONE)
    assert device_table("mi300x-70b-1b").target_devices == 4
    assert ms("mi300x-8b-1b", ONE) == pytest.approx(5.7, rel=0.01)


def test_prompt_rows_cost_less_than_decoding_rows() -> None:
    chunk, decoding = ms("mi300x-70b-1b", Forward(256, 256)), ms("mi300x-70b-1b", Forward(256))
    assert ms("mi300x-70b-1b", ONE) < chunk < 2 * ms("mi300x-70b-1b", ONE) < decoding


def test_device_table_with_a_factor_is_slower() -> None:
    slow, fast = device_table("mi300x-70b-1b*3"), device_table("mi300x-70b-1b")
    assert slow.target(ONE) == pytest.approx(3 * fast.target(ONE))
    assert slow.draft(ONE) == pytest.approx(3 * fast.draft(ONE))


@pytest.mark.parametrize("wrong", ["a100", "mi300x-70b-1b*0", "mi300x-70b-1b*x", "mi300x-70b-1b*", "*2"])
def test_unknown_device_table_is_refused_with_the_known_names(wrong: str) -> None:
    with pytest.raises(SettingsError, match=r"mi300x-70b-1b, mi300x-70b-1b-tp2"):
        device_table(wrong)


def test_forward_of_a_batch_counts_rows_and_context() -> None:
    """A root with two nodes after 5 tokens, and a chunk of 4 prompt tokens after none."""
    nothing = np.empty(0, dtype=np.int32)
    tree = RequestRows([1, 2, 3], [5, 6, 6], [5, 6, 7], np.arange(5, dtype=np.int32), [0, 1, 2], [1, 3, 5])
    chunk = RequestRows([1, 2, 3, 4], [0, 1, 2, 3], [10, 11, 12, 13], nothing, [])
    assert forward_of(build_batch([tree, chunk])) == Forward(7, 4, 5 + 3 + 4, 3 * 8 + 4 * 4)


class SpentTime:
    """A clock that advances by a microsecond at each reading, and by the time of each sleep."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def one_row() -> Batch:
    empty = torch.empty(0, dtype=torch.int32).numpy()
    return build_batch(
        [RequestRows(tokens=[1], positions=[0], write_slots=[0], prefix_slots=empty, wanted=[0])]
    )


def test_result_is_ready_at_the_tables_time_and_the_host_is_free() -> None:
    time = SpentTime()
    model = EmulatedModel(FakeModel(16), lambda _: 0.05, clock=time, sleep=time.sleep)
    result = model.forward(one_row())
    assert time.now < 0.05
    assert not result.completion.ready()
    assert time.slept == []
    ended = result.completion.wait()
    assert result.completion.ready()
    assert 0.05 <= ended <= time.now < 0.0501
    assert time.slept == [pytest.approx(0.05, rel=0.01)]
    assert (model.forwards, model.overruns) == (1, 0)


def test_forward_slower_than_the_table_is_an_overrun() -> None:
    model = EmulatedModel(FakeModel(16), lambda _: 0.0)
    assert model.forward(one_row()).completion.ready()
    assert model.overruns == 1


def test_model_wrapper_setting_emulates_a_table(tmp_path: Path) -> None:
    for wrapper in (emulating("mi300x-70b-1b*2"), emulating("mi300x-70b-1b*2", tmp_path)):
        settings = Settings(model_wrapper=wrapper)
        assert emulated_table(settings) == "mi300x-70b-1b*2"
        assert isinstance(wrap_model(FakeModel(16), "draft", settings.model_wrapper), EmulatedModel)
    assert emulated_table(Settings()) is None
    assert emulated_table(Settings(model_wrapper="another.wrapper:twice")) is None


def test_overrun_share_counts_running_drafters_of_other_processes(tmp_path: Path) -> None:
    """The other files are of this process and of an ended one."""
    settings = Settings(model_wrapper=emulating("mi300x-70b-1b", tmp_path))
    assert overrun_share(settings) == 0.0
    for pid in (os.getppid(), os.getpid(), 1 << 30):
        model = EmulatedModel(FakeModel(16), lambda _: 0.0, tmp_path / f"draft-{pid}.json")
        model.forward(one_row())
    assert overrun_share(settings) == 1.0


def growth(channel: InlineChannel, waits: int) -> list[Growth]:
    channel.receive()
    channel.send(Open(1, 1, (5, 6), (), SamplingParameters(max_tokens=9), 0, root=1))
    found: list[Growth] = []
    for _ in range(waits):
        assert channel.wait(0.0)
        found += [message for message in channel.receive() if isinstance(message, Growth)]
    return found


def test_draft_steps_in_one_call_equal_single_steps() -> None:
    by_step = InlineChannel(core_of(ScriptedSource(), LIMITS), HELLO)
    at_once = OneCallChannel(core_of(ScriptedSource(), LIMITS), HELLO, 3, QueuedModel(FakeModel(16)))
    found = growth(at_once, 1)
    assert len(found) == 3
    assert found == growth(by_step, 3)
    assert (at_once.steps, by_step.steps) == (1, 3)


def test_queued_forwards_are_waited_for_once() -> None:
    time = SpentTime()
    device = EmulatedModel(FakeModel(16), lambda _: 0.05, clock=time, sleep=time.sleep)
    queued = QueuedModel(device)
    for _ in range(3):
        time.now += 0.02  # what the host does between them is hidden
        assert queued.forward(one_row()).completion.ready()
    assert 0.06 < time.now < 0.061
    queued.wait()
    assert 0.17 <= time.now < 0.1701
    assert device.overruns == 0
