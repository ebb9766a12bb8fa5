"""Changes of single tokens' logits that are the same for all rows of a request, prepared once.

Allowed tokens, biases, bad words, and the stop tokens that `min_tokens` forbids, as `processors.edit`
defines them; penalties are not among them. This module knows parameters and rows, no noise and no trees.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.sampling.processors import TokenCounts


class OverrideTensors(NamedTuple):
    """Token ids on a device, int64 [n] each."""

    allowed: torch.Tensor
    biased: torch.Tensor
    biases: torch.Tensor
    """float32 [n], one for each of `biased`."""
    never: torch.Tensor
    """Bad words of a single token."""
    ends: torch.Tensor
    """Tokens that `min_tokens` forbids."""


class LogitOverrides:
    """Overrides of a request, shared by all choices of a prompt. `eos` are the request's end tokens."""

    def __init__(self, parameters: SamplingParameters, eos: Sequence[int] = ()) -> None:
        self.parameters = parameters
        self._eos = tuple(eos)
        self._prepared: tuple[torch.device, int, OverrideTensors] | None = None
        self._words: dict[int, list[tuple[int, ...]]] = {}
        """Bad words of several tokens, by their second-to-last token."""
        for word in parameters.bad_words:
            if len(word) > 1:
                self._words.setdefault(word[-2], []).append(word)
        self._longest = max(map(len, parameters.bad_words), default=0) - 1

    def on(self, device: torch.device, vocabulary: int) -> OverrideTensors:
        """Tensors on this device, without ids outside the vocabulary; created at the first call."""
        if self._prepared is None or self._prepared[:2] != (device, vocabulary):
            self._prepared = device, vocabulary, self._prepare(device, vocabulary)
        return self._prepared[2]

    def _prepare(self, device: torch.device, vocabulary: int) -> OverrideTensors:
        parameters = self.parameters

        def known(tokens: Sequence[int]) -> torch.Tensor:
            ids = np.array(tokens, np.int64)
            return torch.from_numpy(ids[(ids >= 0) & (ids < vocabulary)]).to(device)

        biases = [bias for token, bias in parameters.logit_bias.items() if 0 <= token < vocabulary]
        return OverrideTensors(
            allowed=known(parameters.allowed_token_ids or ()),
            biased=known(tuple(parameters.logit_bias)),
            biases=torch.tensor(biases, dtype=torch.float32).to(device),
            never=known([word[0] for word in parameters.bad_words if len(word) == 1]),
            ends=known((*self._eos, *parameters.stop_token_ids)),
        )

    def completing(self, counts: TokenCounts | None, path: Sequence[int]) -> list[int]:
        """Tokens that would complete a bad word of several tokens after the output and the path."""
        if not self._words:
            return []
        if counts is None:
            raise ValueError("bad words of several tokens need the counts of prompt and output tokens")
        last = path[-1:] or counts.end_of_output(1, ())
        words = self._words.get(last[0]) if last else None
        if not words:
            return []
        text = counts.end_of_output(self._longest, path)
        return [word[-1] for word in words if text[max(0, len(text) - len(word) + 1) :] == word[:-1]]


class Places:
    """Single tokens of rows: a few ids of each."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._ids: list[torch.Tensor] = []

    def add(self, row: int, ids: torch.Tensor) -> None:
        """Add token ids of a row; a row may be added more than once."""
        self.rows.append(row)
        self._ids.append(ids)

    def index(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Index of all places into [rows, vocabulary]; there must be rows."""
        sizes = [len(ids) for ids in self._ids]
        ids = torch.cat(self._ids)
        rows, counts = torch.tensor((self.rows, sizes), dtype=torch.int64).to(ids.device)
        return torch.repeat_interleave(rows, counts, output_size=len(ids)), ids


class RowOverrides(NamedTuple):
    """A row with overrides."""

    row: int
    overrides: LogitOverrides
    early: bool
    """Fewer than `min_tokens` tokens have been generated."""
    counts: TokenCounts | None
    path: Sequence[int]


def apply_overrides(values: torch.Tensor, rows: Sequence[RowOverrides]) -> None:
    """LogitsProcessor float32 [rows, vocabulary] in place; of rows not listed nothing."""
    device, vocabulary = values.device, values.shape[1]
    allowed, biased, masked = Places(), Places(), Places()
    biases: list[torch.Tensor] = []
    completing: list[tuple[int, int]] = []
    for index, overrides, early, counts, path in rows:
        tensors = overrides.on(device, vocabulary)
        if overrides.parameters.allowed_token_ids is not None:
            allowed.add(index, tensors.allowed)
        if len(tensors.biased):
            biased.add(index, tensors.biased)
            biases.append(tensors.biases)
        if len(tensors.never):
            masked.add(index, tensors.never)
        if early and len(tensors.ends):
            masked.add(index, tensors.ends)
        completing += [
            (index, token) for token in overrides.completing(counts, path) if 0 <= token < vocabulary
        ]
    if allowed.rows:
        at = allowed.index()
        kept = values[at]
        values[torch.tensor(allowed.rows).to(device)] = -torch.inf
        values[at] = kept
    if biased.rows:
        values[biased.index()] += torch.cat(biases)
    # A bias leaves a masked token masked, so that masks may come last.
    if masked.rows:
        values[masked.index()] = -torch.inf
    if completing:
        ids = torch.tensor(completing, dtype=torch.int64).T.to(device)
        values[ids[0], ids[1]] = -torch.inf
