"""Models that stand before others: what they have in common, and the seam by which whoever starts a process
puts one before each model that it loads."""

from importlib import import_module
from typing import Literal

from ssd_serve.base.errors import SettingsError
from ssd_serve.models.interface import Model, ModelFacts


class WrappedModel:
    """Stands before a model; what it does about forwards is added by others."""

    def __init__(self, model: Model) -> None:
        self._model = model

    @property
    def facts(self) -> ModelFacts:
        """Facts of the real model."""
        return self._model.facts

    @property
    def slots(self) -> int:
        """Slots of the real model."""
        return self._model.slots


def wrap_model(model: Model, role: Literal["target", "draft"], wrapper: str | None) -> Model:
    """What `wrapper`, a function's import path as in the settings, puts before a model that was loaded for
    this role; None: the model itself. Raises `SettingsError` where there is no such function.

    `package.module:function:argument` is called with the model, its role and the argument, '' where it has
    none.
    """
    if wrapper is None:
        return model
    module, _, rest = wrapper.partition(":")
    name, _, argument = rest.partition(":")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise SettingsError(
            f"SSD_MODEL_WRAPPER: there is no function {name!r} in a module {module!r}"
        ) from error
    wrapped: Model = function(model, role, argument)
    return wrapped
