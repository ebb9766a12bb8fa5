"""A draft model that speaks its target's tokens: ids are translated before a forward, and logits after it.

Knows a table of ids, not where it comes from.
"""

from dataclasses import replace

import numpy as np
import torch

from ssd_serve.kernels.batch import Batch
from ssd_serve.models.interface import ForwardResult, Model, ModelFacts
from ssd_serve.models.text.common_tokens import CommonTokens
from ssd_serve.models.wrapped import WrappedModel


class MappedModel(WrappedModel):
    """Its vocabulary and the tokens that end a text are the target's; what the draft does not have it never
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
