"""Tests of the setting that wraps every model of a process."""

import pytest

from ssd_serve.base.errors import SettingsError
from ssd_serve.kernels.batch import Batch
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.wrapped import WrappedModel, wrap_model
from tests.fakes import FakeModel


class Labelled(WrappedModel):
    """Wrapper that keeps the arguments of its constructor."""

    def __init__(self, model: Model, role: str, argument: str) -> None:
        super().__init__(model)
        self.told = (role, argument)

    def forward(self, batch: Batch) -> ForwardResult:
        return self._model.forward(batch)


@pytest.mark.parametrize(
    ("argument", "told"), [("", ""), (":", ""), (":a", "a"), (":a:b@/tmp/c", "a:b@/tmp/c")]
)
def test_what_the_path_names_is_called_with_the_model_its_role_and_the_argument(
    argument: str, told: str
) -> None:
    model = FakeModel(8)
    wrapped = wrap_model(model, "draft", f"{__name__}:Labelled{argument}")
    assert isinstance(wrapped, Labelled)
    assert wrapped.told == ("draft", told)
    assert wrapped.facts == model.facts


def test_without_a_path_the_model_stands_alone() -> None:
    model = FakeModel(8)
    assert wrap_model(model, "target", None) is model


@pytest.mark.parametrize("path", ["nowhere:f", f"{__name__}:nothing", __name__, "", ":", "..:f", "no where"])
def test_a_path_to_no_function_is_a_wrong_setting(path: str) -> None:
    with pytest.raises(SettingsError, match="SSD_MODEL_WRAPPER: there is no function"):
        wrap_model(FakeModel(8), "target", path)
