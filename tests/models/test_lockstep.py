"""Tests of a following rank: it waits for every forward, so that a failure is detected at that forward."""

from collections.abc import Iterator

import pytest

from ssd_serve.base.errors import DeviceHangError
from ssd_serve.kernels.batch import Batch, build_batch, pack
from ssd_serve.models.interface import ForwardResult
from ssd_serve.models.wrapped import follow
from tests.fakes import FakeModel
from tests.kernels.test_attention import rows_of


class Hanging:
    """Completion of a forward that never ends."""

    def ready(self) -> bool:
        return False

    def wait(self) -> float:
        raise DeviceHangError("it hangs")


class OnBadDevice(FakeModel):
    """Test double of a model that starts forwards and never ends them."""

    def forward(self, batch: Batch) -> ForwardResult:
        result = super().forward(batch)
        return ForwardResult(result.logits, completion=Hanging())


def told() -> Iterator[bytearray | None]:
    part = rows_of(range(2), [], [0, 1], [0, 1], [[0], [0, 1]])
    yield bytearray(pack(build_batch([part._replace(tokens=[5, 6], wanted=range(2))])))
    yield None


def test_it_runs_what_it_is_told_until_nothing_comes() -> None:
    model, messages = FakeModel(8), told()
    follow(model, lambda: next(messages))
    assert (model.forwards, model.rows) == (1, 2)


def test_a_device_that_does_not_end_a_forward_ends_the_rank() -> None:
    messages = told()
    with pytest.raises(DeviceHangError):
        follow(OnBadDevice(8), lambda: next(messages))
