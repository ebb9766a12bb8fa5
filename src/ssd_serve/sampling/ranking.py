"""Ranking of a drafter's tokens: the best few of each row, with calibrated probabilities.

Scores are logits / T - log E: with the target's logits the best would be its choice (`sampling.choice`). On
CPUs the compiled kernel ranks if there is one; losslessness depends on neither. This module knows nothing of
trees.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ssd_serve.kernels.batch import Int32Array
from ssd_serve.kernels.native.library import INT, POINTER, SIZE, NativeLibrary
from ssd_serve.sampling.noise import Float32Array
from ssd_serve.sampling.noise_rows import NoiseRows

logger = logging.getLogger(__name__)

_TOLERANCE = 1e-4
_MASK_64 = (1 << 64) - 1


class RankedChildren(NamedTuple):
    """Best F tokens of each row, best first, on the host."""

    tokens: Int32Array  # [rows, fan_out]
    log_probs: Float32Array  # [rows, fan_out], of the calibrated distribution
    scores: Float32Array  # [rows, fan_out], as given
    expected_score: Float32Array  # [rows], mean score under the calibrated distribution


class _Buffers:
    """Arrays of a call of at most `rows` rows, allocated once with their addresses: getting an address takes
    longer than filling an array."""

    def __init__(self, rows: int, fan_out: int) -> None:
        self.rows, self.fan_out = rows, fan_out
        self.temperatures, self.scales = np.empty(rows, np.float32), np.empty(rows, np.float32)
        self.lines = np.empty(rows, np.int64)
        self.tokens = np.full((rows, fan_out), -1, np.int32)
        self.log_probs, self.scores = (np.empty((rows, fan_out), np.float32) for _ in range(2))
        self.means = np.empty(rows, np.float32)
        inputs = self.lines, self.scales
        results = self.tokens, self.log_probs, self.scores, self.means
        self.temperatures_at = self.temperatures.ctypes.data
        self.inputs_at = [each.ctypes.data for each in inputs]
        self.results_at = [each.ctypes.data for each in results]


class SamplingKeys(NamedTuple):
    """Seeds, positions and temperatures of some rows; seed None and temperature 0: no noise."""

    seeds: list[int | None]
    positions: list[int]
    temperatures: list[float]


class NativeRanking:
    """Ranks rows of float32 logits on the CPU. Of equal scores the lowest token comes first. Not
    thread-safe."""

    def __init__(self, library: NativeLibrary) -> None:
        shape = POINTER, SIZE, SIZE
        self._rank = library.function(
            "ssd_rank", *shape, *(POINTER,) * 4, SIZE, *(POINTER,) * 7, INT, result=INT
        )
        self._buffers = _Buffers(0, 0)

    def rank(
        self,
        logits: torch.Tensor,
        temperatures: Sequence[float],
        table: torch.Tensor,
        lines: Sequence[int],
        scales: Sequence[float],
        fan_out: int,
    ) -> RankedChildren:
        """Rank the tokens of `logits` [rows, vocabulary]. Line `lines[row]` of `table` [lines, vocabulary]
        is the row's noise; line 0: no noise, and temperature 0 counts as 1.

        Raises `MemoryError`.
        """
        if table.shape[1] != logits.shape[1]:
            raise ValueError(f"cannot rank {logits.shape[1]} tokens with noise of {table.shape[1]}")
        return self._run(logits, temperatures, table.data_ptr(), lines, scales, fan_out, (None, None, None))

    def rank_proposed(
        self,
        logits: torch.Tensor,
        keys: SamplingKeys,
        scales: Sequence[float],
        fan_out: int,
        proposed: Int32Array,
    ) -> RankedChildren:
        """Rank the tokens `proposed` by their `logits` [rows, proposed], with noise that is computed for them alone.

        Of equal scores the first comes first. Raises `MemoryError`.
        """
        if len(proposed) != logits.shape[1]:
            raise ValueError(f"{logits.shape[1]} logits are not those of {len(proposed)} tokens")
        seeds = np.array([(seed or 0) & _MASK_64 for seed in keys.seeds], np.uint64)
        positions = np.array(keys.positions, np.int64)
        lines = [0 if seed is None else 1 for seed in keys.seeds]
        places = proposed.ctypes.data, seeds.ctypes.data, positions.ctypes.data
        return self._run(logits, keys.temperatures, None, lines, scales, fan_out, places)

    def _run(
        self,
        logits: torch.Tensor,
        temperatures: Sequence[float],
        table_at: int | None,
        lines: Sequence[int],
        scales: Sequence[float],
        fan_out: int,
        proposed_at: tuple[int, int, int] | tuple[None, None, None],
    ) -> RankedChildren:
        rows, vocabulary = logits.shape
        if not 0 < fan_out <= vocabulary:
            raise ValueError(f"cannot rank {fan_out} of {vocabulary} tokens")
        buffers = self._buffers
        if rows > buffers.rows or fan_out != buffers.fan_out:
            buffers = self._buffers = _Buffers(max(64, rows), fan_out)
        logits = logits.contiguous()
        buffers.temperatures[:rows], buffers.scales[:rows], buffers.lines[:rows] = temperatures, scales, lines
        done = self._rank(
            logits.data_ptr(),
            rows,
            vocabulary,
            buffers.temperatures_at,
            table_at,
            *buffers.inputs_at,
            fan_out,
            *proposed_at,
            *buffers.results_at,
            torch.get_num_threads(),
        )
        if not done:
            raise MemoryError("there is no memory left to rank tokens; run fewer requests at once")
        return RankedChildren(
            buffers.tokens[:rows].copy(),
            buffers.log_probs[:rows].copy(),
            buffers.scores[:rows].copy(),
            buffers.means[:rows].copy(),
        )


@torch.inference_mode()
def draft_scores(
    logits: torch.Tensor, temperature: float | torch.Tensor, noise_rows: torch.Tensor | None
) -> torch.Tensor:
    """Scores logits / T - log E: float32 [rows, vocabulary], defined up to a constant of each row; at T = 0
    the logits.

    `logits` is [rows, vocabulary]. `temperature` is a number for all rows or float32 [rows], 0 meaning
    greedy. `noise_rows` is float32 [rows, vocabulary] of log E, zero in greedy rows as `NoiseRows.rows`
    returns them; None if all rows are greedy.
    """
    values = logits.to(torch.float32)
    if isinstance(temperature, torch.Tensor):
        values = values / torch.where(temperature > 0, temperature, 1.0)[:, None]
    elif temperature not in (0.0, 1.0):
        values = values / temperature
    return values if noise_rows is None else values - noise_rows


@torch.inference_mode()
def rank_scores(scores: torch.Tensor, scales: float | torch.Tensor, fan_out: int) -> RankedChildren:
    """Rank float32 [rows, vocabulary] scores; the calibrated distribution is softmax(scores / scale).

    `scales` is a number or float32 [rows]. The negative log likelihood of an actual choice c has the
    derivative expected_score - score(c) by 1 / scale, which an online fit of the scale needs. Rows without
    finite scores have no finite log-probabilities.
    """
    inverse = (1.0 / scales) if isinstance(scales, torch.Tensor) else torch.full((len(scores),), 1.0 / scales)
    inverse = inverse.to(scores.device)[:, None]  # [rows, 1]
    scaled = scores * inverse
    best, tokens = torch.topk(scaled, fan_out, dim=1)  # [rows, fan_out]
    weights = torch.softmax(scaled, dim=1)  # [rows, vocabulary]
    most = weights.gather(1, tokens[:, :1])
    expected = (weights * scaled).sum(dim=1, keepdim=True)
    packed = torch.cat((best, most, expected, inverse, tokens.to(torch.float32)), dim=1)
    values: Float32Array = packed.cpu().numpy()  # one copy from the device; ids below 2^24 are exact
    top, (share, mean, factor) = values[:, :fan_out], values[:, fan_out : fan_out + 3].T
    if np.isnan(mean).any():  # a token of score -inf weighs 0 in the mean, not NaN
        mean = (weights * scaled.clamp(min=-1e30)).sum(dim=1).cpu().numpy()
    with np.errstate(invalid="ignore"):
        log_probabilities = top - top[:, :1] + np.log(share)[:, None]
    return RankedChildren(
        values[:, fan_out + 3 :].astype(np.int32),
        log_probabilities,
        top / factor[:, None],
        mean / factor,
    )


def rank_children(
    logits: torch.Tensor,
    keys: SamplingKeys,
    noise: NoiseRows,
    scales: Sequence[float],
    fan_out: int,
    native: NativeRanking | None = None,
    lines: Sequence[int] | None = None,
) -> RankedChildren:
    """Rank the `draft_scores` of float32 [rows, vocabulary] logits. `native`, if given, ranks by the same
    scores, bit for bit. `lines`: the result of `noise.lines_of` for these keys."""
    seeds, positions, temperatures = keys
    lines = noise.lines_of(seeds, positions) if native is not None and lines is None else lines
    if native is not None and lines is not None:
        return native.rank(logits, temperatures, noise.table, lines, scales, fan_out)
    if seeds.count(None) == len(seeds):
        scores = draft_scores(logits, 0.0, None)
    else:
        divisors = torch.tensor(temperatures, device=logits.device)
        scores = draft_scores(logits, divisors, noise.rows(seeds, positions))
    return rank_scores(scores, torch.tensor(scales, dtype=torch.float32), fan_out)


def trusted_ranking(library: NativeLibrary | None) -> NativeRanking | None:
    """The compiled ranking, if its self-test passes: torch's ranking of a few rows. A failure is logged."""
    if library is None:
        return None
    native, noise = NativeRanking(library), NoiseRows(333, 8)
    logits = 4 * torch.randn((4, 333), generator=torch.Generator().manual_seed(0))
    keys, scales = (
        SamplingKeys([None, 5, (1 << 64) - 1, 5], [3, 3, 4, 3], [0.0, 0.6, 1.0, 1.3]),
        [0.7, 1, 1.3, 0.4],
    )
    found = rank_children(logits, keys, noise, scales, 5, native)
    right = rank_children(logits, keys, noise, scales, 5)
    close = (
        np.allclose(ours, theirs, rtol=_TOLERANCE, atol=_TOLERANCE)
        for ours, theirs in zip(found[1:], right[1:], strict=True)
    )
    if np.array_equal(found.tokens, right.tokens) and all(close):
        return native
    logger.warning(
        "the compiled ranking of tokens failed its self-test and is not used: %s instead of %s",
        found.tokens.tolist(),
        right.tokens.tolist(),
    )
    return None
