"""Tests of emulated devices: a forward is ready at the time in its table, and not earlier."""

import os
from pathlib import Path

import pytest
import torch

from ssd_serve.base.settings import Settings
from ssd_serve.bench.device_tables import Flat
from ssd_serve.bench.emulated import (
    EmulatedModel,
    emulated_table,
    emulating,
    overrun_share,
)
from ssd_serve.kernels.batch import Batch, RequestRows, build_batch
from ssd_serve.models.wrapped import wrap_model
from tests.fakes import FakeModel


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


def test_the_result_is_ready_at_the_tables_time_while_the_host_is_free() -> None:
    time = SpentTime()
    model = EmulatedModel(FakeModel(16), Flat(0.05), clock=time, sleep=time.sleep)
    result = model.forward(one_row())
    assert time.now < 0.05
    assert not result.completion.ready()
    assert time.slept == []
    ended = result.completion.wait()
    assert result.completion.ready()
    assert 0.05 <= ended <= time.now < 0.0501
    assert time.slept == [pytest.approx(0.05, rel=0.01)]
    assert (model.forwards, model.overruns) == (1, 0)


def test_a_forward_that_takes_longer_counts_as_it_is() -> None:
    model = EmulatedModel(FakeModel(16), Flat(0.0))
    result = model.forward(one_row())
    assert result.completion.ready()
    assert model.overruns == 1


def test_the_setting_that_emulates_a_table_puts_its_device_before_a_model(tmp_path: Path) -> None:
    for wrapper in (emulating("mi300x-70b-1b*2"), emulating("mi300x-70b-1b*2", tmp_path)):
        settings = Settings(model_wrapper=wrapper)
        assert emulated_table(settings) == "mi300x-70b-1b*2"
        assert isinstance(wrap_model(FakeModel(16), "draft", settings.model_wrapper), EmulatedModel)
    assert emulated_table(Settings()) is None
    assert emulated_table(Settings(model_wrapper="house.slow:twice")) is None


def test_drafters_of_other_processes_say_how_many_forwards_took_too_long(tmp_path: Path) -> None:
    """Only the parent's file counts as a drafter: the others are of this process and of an ended one."""
    settings = Settings(model_wrapper=emulating("mi300x-70b-1b", tmp_path))
    assert overrun_share(settings) == 0.0
    for pid in (os.getppid(), os.getpid(), 1 << 30):
        model = EmulatedModel(FakeModel(16), Flat(0.0), tmp_path / f"draft-{pid}.json")
        model.forward(one_row())
    assert overrun_share(settings) == 1.0
