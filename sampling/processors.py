"""Logits processors: pure functions of (parameters, prompt ids, output ids + the row's path, EOS ids).

Order, as in vLLM: allowed tokens, bad words, logit bias, EOS mask until min_tokens, repetition, frequency and
presence penalties, temperature, min-p, top-k, top-p. Masked tokens are -inf. At temperature 0 the steps from
temperature on are left out: none of them can change the most probable token.

Everything here works on one row [vocabulary] at a time, so that a row's result cannot depend on its batch,
and is deterministic: equal logits keep the lowest ids. A NaN logit counts as -inf. This module knows nothing
of noise, requests or trees.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from ssd_serve.kernels.batch import Int32Array, Int64Array
from ssd_serve.messages import SamplingParameters
from ssd_serve.sampling.parameters import is_greedy, penalises

TOP_P_UNITS = 2.0**50


class TokenCounts:
    """Which tokens a request's prompt and output hold: a cache that can be rebuilt from both at any time.

    Sparse: parallel arrays of distinct tokens and of how often each stands in the output (0: prompt only).
    Beside them the output itself, for bad words.
    """

    def __init__(self, prompt: Iterable[int], output: Iterable[int] = ()) -> None:
        distinct = list(dict.fromkeys(prompt))
        self._index = {token: index for index, token in enumerate(distinct)}
        room = max(64, 2 * len(distinct))
        self._tokens: Int64Array = np.zeros(room, dtype=np.int64)
        self._tokens[: len(distinct)] = distinct
        self._counts: Int32Array = np.zeros(room, dtype=np.int32)
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

    def behind(self, output: Iterable[int]) -> "TokenCounts":
        """Another text of the same beginning, which goes on with this output."""
        other = TokenCounts(())
        other._index = dict(self._index)
        other._tokens, other._counts = self._tokens.copy(), self._counts.copy()
        other._output = list(self._output)
        other.extend(output)
        return other

    def with_path(self, path: Sequence[int]) -> tuple[Int64Array, Int32Array]:
        """Distinct tokens int64 [n], and int32 [n] how often each stands in the output and the path."""
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
        """The distinct tokens of the path, each with how often it stands in the output and the path."""
        counted = Counter(path)
        return [(token, times + self._times(token)) for token, times in counted.items()]

    def _times(self, token: int) -> int:
        index = self._index.get(token)
        return 0 if index is None else int(self._counts[index])

    def end_of_output(self, count: int, path: Sequence[int]) -> tuple[int, ...]:
        """The last `count` tokens of the output and the path, or all where there are fewer."""
        text = (*self._output[-count:], *path) if count > 0 else ()
        return text[max(0, len(text) - count) :]


def process(
    logits: torch.Tensor,
    parameters: SamplingParameters,
    counts: TokenCounts | None,
    path: Sequence[int],
    generated: int,
    eos: Sequence[int],
) -> torch.Tensor:
    """Processed logits of one row: float32 [vocabulary] -> float32 [vocabulary], a new tensor.

    `path` holds the tokens beyond the counted output, `generated` the number of output tokens before this
    row's choice (path included). `counts` may be None where `needs_counts` is false.
    """
    row = edit(logits, parameters, counts, path, generated, eos)
    if is_greedy(parameters):
        return row
    # Dividing by a tensor: by a Python number some backends multiply by the reciprocal instead.
    row = row / torch.tensor(parameters.temperature, dtype=torch.float32).to(row.device)
    if parameters.min_p > 0.0:
        row = keep_min_p(row, parameters.min_p)
    if 0 < parameters.top_k < len(row):
        row = keep_top_k(row, parameters.top_k)
    if parameters.top_p < 1.0:
        row = keep_top_p(row, parameters.top_p)
    return row


def edit(
    logits: torch.Tensor,
    parameters: SamplingParameters,
    counts: TokenCounts | None,
    path: Sequence[int],
    generated: int,
    eos: Sequence[int],
) -> torch.Tensor:
    """The steps of `process` before division by the temperature; the same arguments."""
    row = torch.where(torch.isnan(logits), -torch.inf, logits)  # [vocabulary]
    if parameters.allowed_token_ids is not None:
        row = keep_only(row, parameters.allowed_token_ids)
    if parameters.bad_words:
        _mask(row, completing(parameters, counts, path))
    if parameters.logit_bias:
        _add_bias(row, parameters.logit_bias)
    if generated < parameters.min_tokens:
        _mask(row, (*eos, *parameters.stop_token_ids))
    if penalises(parameters):
        if counts is None:
            raise ValueError("penalties need the counts of prompt and output tokens")
        _penalise(row, parameters, *counts.with_path(path))
    return row


def keep_only(row: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Mask all but these tokens; ids outside the vocabulary are passed over."""
    index = _indices(row, tokens)
    result = torch.full_like(row, -torch.inf)
    result[index] = row[index]
    return result


def _mask(row: torch.Tensor, tokens: Sequence[int]) -> None:
    """Make these tokens impossible, in place; ids outside the vocabulary are passed over."""
    row[_indices(row, tokens)] = -torch.inf


def _indices(row: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    ids = np.array(tokens, dtype=np.int64)
    return torch.from_numpy(ids[(ids >= 0) & (ids < len(row))]).to(row.device)


def completing(parameters: SamplingParameters, counts: TokenCounts | None, path: Sequence[int]) -> list[int]:
    """The tokens that would complete a bad word: its last one, where the output ends with the rest.

    As in vLLM, a word that began in the prompt is not one that was generated.
    """
    longest = max(map(len, parameters.bad_words)) - 1
    if longest > 0 and counts is None:
        raise ValueError("bad words of several tokens need the counts of prompt and output tokens")
    text = counts.end_of_output(longest, path) if counts is not None else ()
    return [
        word[-1]
        for word in parameters.bad_words
        if word and text[max(0, len(text) - len(word) + 1) :] == word[:-1]
    ]


def _add_bias(row: torch.Tensor, bias: dict[int, float]) -> None:
    tokens = np.fromiter(bias, np.int64, len(bias))
    values = np.fromiter(bias.values(), np.float32, len(bias))
    known = (tokens >= 0) & (tokens < len(row))
    row[torch.from_numpy(tokens[known]).to(row.device)] += torch.from_numpy(values[known]).to(row.device)


def _penalise(
    row: torch.Tensor, parameters: SamplingParameters, tokens: Int64Array, counts: Int32Array
) -> None:
    """Penalties, in place.

    Repetition (Keskar et al. 2019; prompt and output): positive logits are divided, others multiplied.
    Frequency and presence (OpenAI; output only): logit -= count * frequency + (count > 0) * presence.
    """
    index = torch.from_numpy(tokens).to(row.device)  # [n]
    times = torch.from_numpy(counts).to(row.device, torch.float32)  # [n]
    values = row[index]
    if parameters.repetition_penalty != 1.0:
        penalty = torch.tensor(parameters.repetition_penalty, dtype=torch.float32).to(row.device)
        values = torch.where(values > 0, values / penalty, values * penalty)
    values = values - parameters.frequency_penalty * times
    row[index] = values - parameters.presence_penalty * (times > 0).to(torch.float32)


def keep_min_p(row: torch.Tensor, min_p: float) -> torch.Tensor:
    """Mask tokens whose probability is less than `min_p` times that of the most probable token."""
    if min_p >= 1.0:
        return torch.where(row < row.max(), -torch.inf, row)
    return torch.where(row < row.max() + math.log(min_p), -torch.inf, row)


def keep_top_k(row: torch.Tensor, k: int) -> torch.Tensor:
    """Mask all but exactly the k largest logits; of equal ones the lowest ids stay."""
    threshold = torch.topk(row, k).values[-1]
    above = row > threshold
    equal = row == threshold
    room = k - above.sum()
    stay = above | (equal & (torch.cumsum(equal, 0) <= room))
    return torch.where(stay, row, -torch.inf)


def keep_top_p(row: torch.Tensor, top_p: float) -> torch.Tensor:
    """Mask all but the smallest set of most probable tokens whose probabilities sum to at least `top_p`.

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
    """A probability below which no token is in the set of `keep_top_p`: only the rest, mostly few, need be
    ordered.

    Tokens below (1 - top_p) / vocabulary weigh less than 1 - top_p together. The factor 1/2 leaves room for
    rounding.
    """
    return 0.5 * (1.0 - top_p) / vocabulary
