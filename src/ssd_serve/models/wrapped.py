"""Wrappers of models, and the setting by which the launcher of a process
puts one before each model that it loads."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Literal

import numpy as np
import torch

from ssd_serve.base.errors import SettingsError
from ssd_serve.kernels.batch import Batch, pack, unpack
from ssd_serve.models.interface import ForwardResult, Model, ModelFacts
from ssd_serve.models.text.tokenizer import CommonTokens


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

    def release(self, spans: Sequence[range]) -> None:
        """Release slots of the real model."""
        self._model.release(spans)


def wrap_model(model: Model, role: Literal["target", "draft"], wrapper: str | None) -> Model:
    """Wrap a model by `wrapper`, a function's import path as in the settings, for
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


class MappedModel(WrappedModel):
    """Model with the target's vocabulary and end tokens; a token that the draft lacks is never
    proposes."""

    def __init__(self, model: Model, tokens: CommonTokens, ends: tuple[int, ...]) -> None:
        super().__init__(model)
        self._read = tokens.read
        missing = tokens.ids < 0
        self._columns = torch.from_numpy(np.where(missing, 0, tokens.ids)).to(model.facts.device)
        self._missing = torch.from_numpy(missing).to(model.facts.device)  # [vocabulary], bool
        self._facts = replace(model.facts, vocabulary=len(tokens.ids), eos_token_ids=ends)

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    def forward(self, batch: Batch) -> ForwardResult:
        """`batch` has the target's tokens."""
        result = self._model.forward(replace(batch, tokens=self._read[batch.tokens]))
        logits = result.logits.index_select(1, self._columns).masked_fill_(self._missing, -torch.inf)
        return replace(result, logits=logits)


class LeaderModel(WrappedModel):
    """The whole model as rank 0 has it: `model` is its own share, `send` sends a message to all others."""

    def __init__(self, model: Model, send: Callable[[bytes], None]) -> None:
        super().__init__(model)
        self._send = send

    def forward(self, batch: Batch) -> ForwardResult:
        self._send(pack(batch))
        return self._model.forward(batch)


def follow(model: Model, receive: Callable[[], bytearray | None]) -> None:
    """Run the forwards of rank 0 with another rank's share, until `receive` returns None.

    Each forward is waited for: otherwise a failed GPU would not be noticed.
    """
    while (message := receive()) is not None:
        model.forward(unpack(message)).completion.wait()
