"""Emulated devices: a forward is ready when its table says, and not before."""

import time

import pytest
import torch

from ssd_serve.errors import SettingsError
from ssd_serve.kernels.batch import Batch, RequestRows, build_batch
from ssd_serve.models.emulated import DeviceTable, EmulatedModel, device_table
from tests.fakes import FakeModel


def one_row() -> Batch:
    empty = torch.empty(0, dtype=torch.int32).numpy()
    return build_batch(
        [RequestRows(tokens=[1], positions=[0], write_slots=[0], prefix_slots=empty, wanted=[0])]
    )


def test_the_result_is_ready_at_the_tables_time_while_the_host_is_free() -> None:
    model = EmulatedModel(FakeModel(16), step_s=0.5, flat_rows=64)
    started = time.perf_counter()
    result = model.forward(one_row())
    assert not result.completion.ready()
    ended = result.completion.wait()
    assert result.completion.ready()
    assert ended - started >= 0.5
    assert time.perf_counter() >= ended
    assert (model.forwards, model.overruns) == (1, 0)


def test_a_forward_that_takes_longer_counts_as_it_is() -> None:
    model = EmulatedModel(FakeModel(16), step_s=0.0, flat_rows=64)
    result = model.forward(one_row())
    assert result.completion.ready()
    assert model.overruns == 1


def test_tables_have_names_and_may_be_slower() -> None:
    assert device_table("mi300x-70b-1b") == DeviceTable(0.0191, 0.0018, 64)
    assert device_table("mi300x-70b-1b*2") == DeviceTable(0.0382, 0.0036, 64)
    for wrong in ("a100", "mi300x-70b-1b*0", "mi300x-70b-1b*x", "*2"):
        with pytest.raises(SettingsError, match=r"mi300x-70b-1b"):
            device_table(wrong)
