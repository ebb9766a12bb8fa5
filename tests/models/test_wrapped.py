"""Wrapped models: the setting that names a wrapper, and ranks that follow rank 0."""

from collections.abc import Iterator

import pytest

from ssd_serve.base.errors import DeviceHangError, SettingsError
from ssd_serve.kernels.batch import Batch, build_batch, pack
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.wrapped import WrappedModel, follow, wrap_model
from tests.fakes import FakeModel
from tests.kernels.test_attention import rows_of


class Labelled(WrappedModel):
    """Wrapper that keeps the arguments of its constructor."""

    def __init__(self, model: Model, role: str, argument: str) -> None:
        super().__init__(model)
        self.given = (role, argument)

    def forward(self, batch: Batch) -> ForwardResult:
        return self._model.forward(batch)


@pytest.mark.parametrize(
    ("argument", "given"), [("", ""), (":", ""), (":a", "a"), (":a:b@/tmp/c", "a:b@/tmp/c")]
)
def test_wrapper_gets_model_role_and_argument(argument: str, given: str) -> None:
    model = FakeModel(8)
    wrapped = wrap_model(model, "draft", f"{__name__}:Labelled{argument}")
    assert isinstance(wrapped, Labelled)
    assert wrapped.given == ("draft", given)
    assert wrapped.facts == model.facts


def test_no_wrapper_returns_the_model() -> None:
    model = FakeModel(8)
    assert wrap_model(model, "target", None) is model


@pytest.mark.parametrize("path", ["nowhere:f", f"{__name__}:nothing", __name__, "", ":", "..:f", "no where"])
def test_wrapper_path_to_no_function_is_refused(path: str) -> None:
    with pytest.raises(SettingsError, match="SSD_MODEL_WRAPPER: there is no function"):
        wrap_model(FakeModel(8), "target", path)


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


def messages_of_one_batch() -> Iterator[bytearray | None]:
    part = rows_of(range(2), [], [0, 1], [0, 1], [[0], [0, 1]])
    yield bytearray(pack(build_batch([part._replace(tokens=[5, 6], wanted=range(2))])))
    yield None


def test_following_rank_runs_batches_until_none_arrives() -> None:
    model, messages = FakeModel(8), messages_of_one_batch()
    follow(model, lambda: next(messages))
    assert (model.forwards, model.rows) == (1, 2)


def test_hanging_device_ends_the_following_rank() -> None:
    messages = messages_of_one_batch()
    with pytest.raises(DeviceHangError):
        follow(OnBadDevice(8), lambda: next(messages))
