"""Logits processors: pure functions of (parameters, prompt ids, output ids + the row's path, EOS ids).

They are applied in the order of the table of `parameters.py`, which is vLLM's. Masked tokens are -inf. At
temperature 0 the steps from temperature on are skipped: none can change the most probable token.

Everything here works on one row [vocabulary] at a time, so that a row's result cannot depend on its batch.
Results are deterministic: equal logits keep the lowest ids. A NaN logit counts as -inf. This module knows
nothing of noise, requests or trees.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pkgutil import resolve_name
from typing import Any, NamedTuple

import numpy as np
import torch

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.kernels.batch import Int32Array, Int64Array
from ssd_serve.sampling.grammar import Mask
from ssd_serve.sampling.parameters import Parameter, Stage, in_stages, is_greedy

TOP_P_UNITS = 2.0**50


class TokenCounts:
    """Token counts of a request's prompt and output: a cache that can be rebuilt from both at any time.

    Sparse: parallel arrays of distinct tokens and their counts in the output (0: prompt only). The output
    itself is kept too, for bad words.
    """

    def __init__(self, prompt: Iterable[int], output: Iterable[int] = ()) -> None:
        distinct = list(dict.fromkeys(prompt))
        self._index = {token: index for index, token in enumerate(distinct)}
        capacity = max(64, 2 * len(distinct))
        self._tokens: Int64Array = np.zeros(capacity, dtype=np.int64)
        self._tokens[: len(distinct)] = distinct
        self._counts: Int32Array = np.zeros(capacity, dtype=np.int32)
        self._output: list[int] = []
        self.extend(output)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append committed output tokens."""
        for token in tokens:
            self._output.append(token)
            index = self._index.get(token)
            if index is None:
                index = self._index[token] = len(self._index)
                if index == len(self._tokens):
                    self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
                    self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
                self._tokens[index] = token
            self._counts[index] += 1

    def fork(self, output: Iterable[int]) -> "TokenCounts":
        """An independent copy, extended by this output."""
        other = TokenCounts(())
        other._index = dict(self._index)
        other._tokens, other._counts = self._tokens.copy(), self._counts.copy()
        other._output = list(self._output)
        other.extend(output)
        return other

    def with_path(self, path: Sequence[int]) -> tuple[Int64Array, Int32Array]:
        """Distinct tokens int64 [n], and int32 [n] their counts in the output and the path."""
        size = len(self._index)
        if not path:
            return self._tokens[:size], self._counts[:size]
        new = [token for token in dict.fromkeys(path) if token not in self._index]
        tokens = np.concatenate((self._tokens[:size], np.array(new, dtype=np.int64)))
        counts = np.concatenate((self._counts[:size], np.zeros(len(new), dtype=np.int32)))
        added = {token: size + index for index, token in enumerate(new)}
        for token in path:
            counts[added[token] if token in added else self._index[token]] += 1
        return tokens, counts

    def on_path(self, path: Sequence[int]) -> list[tuple[int, int]]:
        """Distinct tokens of the path, each with its count in the output and the path."""
        counted = Counter(path)
        return [(token, times + self._times(token)) for token, times in counted.items()]

    def _times(self, token: int) -> int:
        index = self._index.get(token)
        return 0 if index is None else int(self._counts[index])

    def end_of_output(self, count: int, path: Sequence[int]) -> tuple[int, ...]:
        """The last `count` tokens of the output and the path, or all where there are fewer."""
        text = (*self._output[-count:], *path) if count > 0 else ()
        return text[max(0, len(text) - count) :]


class RowContext(NamedTuple):
    """Text before the token that a row chooses, and the tokens that end it."""

    counts: TokenCounts | None = None
    """Needed where `needs_counts` of the row's parameters."""
    path: Sequence[int] = ()
    """Tokens after the counted output."""
    generated: int = 0
    """Output tokens, path included."""
    ends: Sequence[int] = ()
    """Stop tokens."""


LogitsProcessor = Callable[[torch.Tensor, Any, RowContext], torch.Tensor]
"""Function of a row float32 [vocabulary], a parameter's value and the text before; may change the row in
place."""


def process(logits: torch.Tensor, parameters: SamplingParameters, before: RowContext) -> torch.Tensor:
    """Processed logits of one row: float32 [vocabulary] -> float32 [vocabulary], a new tensor."""
    row = edit(logits, parameters, before)
    if is_greedy(parameters):
        return row
    return _changed(row, parameters, before, Stage.TEMPERATURE, Stage.TRUNCATION)


def edit(logits: torch.Tensor, parameters: SamplingParameters, before: RowContext) -> torch.Tensor:
    """The steps of `process` before division by the temperature."""
    row = torch.where(torch.isnan(logits), -torch.inf, logits)  # [vocabulary]
    return _changed(row, parameters, before, Stage.TOKENS, Stage.START, Stage.PENALTY)


def _changed(
    row: torch.Tensor, parameters: SamplingParameters, before: RowContext, *stages: Stage
) -> torch.Tensor:
    for each, change in processor_functions(*stages):
        value = getattr(parameters, each.name)
        if value != each.neutral and (each.stage is not Stage.START or before.generated < value):
            row = change(row, value, before)
    return row


@cache
def processor_functions(*stages: Stage) -> tuple[tuple[Parameter, LogitsProcessor], ...]:
    """The parameters of these stages in order of application, each with its function."""
    names = [
        each.function if ":" in each.function else f"{__name__}:{each.function}"
        for each in in_stages(*stages)
    ]
    return tuple(zip(in_stages(*stages), map(resolve_name, names), strict=True))


def keep_only(row: torch.Tensor, tokens: Sequence[int], _before: RowContext) -> torch.Tensor:
    """Mask all but these tokens; ids outside the vocabulary are ignored."""
    index = _indices(row, tokens)
    result = torch.full_like(row, -torch.inf)
    result[index] = row[index]
    return result


def _masked(row: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    row[_indices(row, tokens)] = -torch.inf
    return row


def _indices(row: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    ids = np.array(tokens, dtype=np.int64)
    return torch.from_numpy(ids[(ids >= 0) & (ids < len(row))]).to(row.device)


def mask_words(row: torch.Tensor, words: Sequence[tuple[int, ...]], before: RowContext) -> torch.Tensor:
    """Mask the last token of each word of which the output ends with the rest.

    As in vLLM, a word that began in the prompt does not count as generated.
    """
    longest = max(map(len, words)) - 1
    if longest > 0 and before.counts is None:
        raise ValueError("bad words of several tokens need the counts of prompt and output tokens")
    text = before.counts.end_of_output(longest, before.path) if before.counts is not None else ()
    ends = [word[-1] for word in words if word and text[max(0, len(text) - len(word) + 1) :] == word[:-1]]
    return _masked(row, ends)


def add_bias(row: torch.Tensor, bias: dict[int, float], _before: RowContext) -> torch.Tensor:
    """Add to the logits of single tokens; ids outside the vocabulary are ignored."""
    tokens = np.fromiter(bias, np.int64, len(bias))
    values = np.fromiter(bias.values(), np.float32, len(bias))
    known = (tokens >= 0) & (tokens < len(row))
    row[torch.from_numpy(tokens[known]).to(row.device)] += torch.from_numpy(values[known]).to(row.device)
    return row


def mask_ends(row: torch.Tensor, _min_tokens: int, before: RowContext) -> torch.Tensor:
    """Mask the stop tokens."""
    return _masked(row, before.ends)


def _counted(row: torch.Tensor, before: RowContext) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [n] tokens of the text, and float32 [n] their counts in the output."""
    if before.counts is None:
        raise ValueError("penalties need the counts of prompt and output tokens")
    return counts_on_device(before.counts, before.path, row.device)


def counts_on_device(
    counts: TokenCounts, path: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """`TokenCounts.with_path` as tensors: int64 [n] tokens, and float32 [n] counts."""
    tokens, times = counts.with_path(path)
    return torch.from_numpy(tokens).to(device), torch.from_numpy(times).to(device, torch.float32)


def penalise_repetition(row: torch.Tensor, penalty: float, before: RowContext) -> torch.Tensor:
    """Divide positive logits of tokens of prompt and output, multiply negative ones (Keskar et al. 2019)."""
    index, _ = _counted(row, before)
    # Dividing by a tensor: by a Python number some backends multiply by the reciprocal instead.
    factor, values = torch.tensor(penalty, dtype=torch.float32).to(row.device), row[index]
    row[index] = torch.where(values > 0, values / factor, values * factor)
    return row


def penalise_frequency(row: torch.Tensor, penalty: float, before: RowContext) -> torch.Tensor:
    """Subtract count * penalty from the logits of output tokens (OpenAI)."""
    index, times = _counted(row, before)
    row[index] = row[index] - penalty * times
    return row


def penalise_presence(row: torch.Tensor, penalty: float, before: RowContext) -> torch.Tensor:
    """Subtract the penalty from the logits of output tokens (OpenAI)."""
    index, times = _counted(row, before)
    row[index] = row[index] - penalty * (times > 0).to(torch.float32)
    return row


def divide(row: torch.Tensor, temperature: float, _before: RowContext) -> torch.Tensor:
    """Logits over the temperature; by a tensor, as in `penalise_repetition`."""
    return row / torch.tensor(temperature, dtype=torch.float32).to(row.device)


def keep_min_p(row: torch.Tensor, min_p: float, _before: RowContext) -> torch.Tensor:
    """Mask tokens with a probability below `min_p` times that of the most probable token."""
    if min_p >= 1.0:
        return torch.where(row < row.max(), -torch.inf, row)
    return torch.where(row < row.max() + math.log(min_p), -torch.inf, row)


def keep_top_k(row: torch.Tensor, k: int, _before: RowContext) -> torch.Tensor:
    """Mask all but exactly the k largest logits; of equal ones the lowest ids stay."""
    if not 0 < k < len(row):
        return row
    threshold = torch.topk(row, k).values[-1]
    above = row > threshold
    equal = row == threshold
    remaining = k - above.sum()
    stay = above | (equal & (torch.cumsum(equal, 0) <= remaining))
    return torch.where(stay, row, -torch.inf)


def keep_top_p(row: torch.Tensor, top_p: float, _before: RowContext) -> torch.Tensor:
    """Mask all but the smallest set of most probable tokens with probabilities that sum to at least `top_p`.

    The most probable token always stays; of equal ones the lowest ids stay. Probabilities are float64: where
    two devices' exponentials differ in the last bit, the set differs in about one row of 10^12.
    """
    probabilities = torch.softmax(row.to(torch.float64), 0)
    smallest = smallest_share(top_p, len(row))
    candidates = torch.nonzero(probabilities >= smallest).flatten()  # [n], ascending ids
    order = torch.sort(row[candidates], descending=True, stable=True).indices
    # Sums of integers are exact in any order of adding; sums of floats differ between runs on some devices.
    units = (probabilities[candidates[order]] * TOP_P_UNITS).to(torch.int64)
    inside = torch.cumsum(units, 0) - units < int(top_p * TOP_P_UNITS)
    inside[:1] = True
    stay = candidates[order[inside]]
    result = torch.full_like(row, -torch.inf)
    result[stay] = row[stay]
    return result


def smallest_share(top_p: float, vocabulary: int) -> float:
    """Probability below which no token is in the set of `keep_top_p`, so that only the rest need be sorted.

    Tokens below (1 - top_p) / vocabulary sum to less than 1 - top_p. The factor 1/2 allows for rounding.
    """
    return 0.5 * (1.0 - top_p) / vocabulary


def apply_masks(logits: torch.Tensor, masks: Sequence[Mask | None]) -> torch.Tensor:
    """Mask float [rows, vocabulary] with -inf as the rows' grammar masks require; a new tensor if there are
    masks."""
    places = [place for place, mask in enumerate(masks) if mask is not None]
    if not places:
        return logits
    packed = np.stack([mask for mask in masks if mask is not None]).view(np.uint8)
    bits = np.unpackbits(packed, axis=1, count=logits.shape[1], bitorder="little")  # [masked, vocabulary]
    allowed = torch.from_numpy(bits.view(np.bool_)).to(logits.device)
    index = torch.tensor(places).to(logits.device)
    masked = torch.where(allowed, logits.index_select(0, index), -torch.inf)
    return logits.index_copy(0, index, masked)
