"""A pair of models without weights: the draft's guesses are right with given probabilities.

The engine's own noise draws the target's choices, so that a seed has one text, however it is drafted. Knows
neither steps' times nor what is planned with them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.drafter.sources.contract import Candidates, NodeRequest
from ssd_serve.kernels.batch import Batch
from ssd_serve.models.interface import ForwardResult, ModelFacts

_LATER = 0.45
_LEAST = 1e-12


@dataclass(frozen=True, slots=True)
class DraftQuality:
    """How good a draft is: its first guess is right with probability `first`; where all before were wrong,
    each further one with 0.45 times that.

    That is what the embedded pair shows: its first guess is right in 0.525 to 0.572 of positions, and one of
    its best four in 0.80 to 0.82.
    """

    first: float

    def probabilities(self, fan_out: int) -> list[float]:
        """Of the ranked candidates of one node to be the target's choice: [fan_out], falling."""
        later = _LATER * self.first
        rest = [(1 - self.first) * later * (1 - later) ** k for k in range(fan_out - 1)]
        return [self.first, *rest]


class GuessedTarget:
    """A target that chooses token k as often as the draft's guess of rank k is right, whatever the text is;
    the last token stands for all that are no guess."""

    def __init__(self, guesses: Sequence[float], slots: int) -> None:
        self.slots = slots
        rest = 1 - sum(guesses)
        self._logits = torch.tensor([[math.log(max(each, _LEAST)) for each in (*guesses, rest)]])

    @property
    def facts(self) -> ModelFacts:
        """Of no model: the vocabulary is that of guesses."""
        return ModelFacts("simulated", self._logits.shape[1], self.slots, 1, 1, (), 1, 1, "cpu", "float32")

    def forward(self, batch: Batch) -> ForwardResult:
        """The same logits for every row."""
        return ForwardResult(self._logits.expand(len(batch.rows_wanted), -1))


class GuessSource:
    """A draft source with the guesses of a `GuessedTarget`, which knows how good they are. `stepped` is
    called in every step."""

    is_warmup_step = False

    def __init__(self, guesses: Sequence[float], stepped: Callable[[], object]) -> None:
        values = np.log(np.maximum(guesses, _LEAST)).astype(np.float32)
        tokens = np.arange(len(guesses), dtype=np.int32)
        self._candidates = Candidates(tokens, values, values, float(values[0]))
        self._stepped = stepped

    def open(self, request: int, tokens: Sequence[int], parameters: SamplingParameters, seed: int) -> None:
        """Nothing is remembered."""

    def commit(self, request: int, tokens: Sequence[int], path: Sequence[int], kept: Sequence[int]) -> None:
        """Nothing is remembered."""

    def expand(self, picks: Sequence[NodeRequest], scales: Sequence[float]) -> list[Candidates | None]:
        """The same candidates for every node."""
        del scales
        self._stepped()
        return [self._candidates] * len(picks)

    def close(self, request: int) -> None:
        """Nothing is remembered."""
