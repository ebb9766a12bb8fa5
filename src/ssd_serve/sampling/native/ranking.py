"""Ranking tokens by the compiled kernel: temperature, noise, the best few, log-sum-exp and mean in one pass.

Knows rows, not what they are for.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ssd_serve.kernels.batch import Int32Array
from ssd_serve.kernels.native.library import INT, POINTER, SIZE, NativeLibrary
from ssd_serve.sampling.noise import Float32Array


class RankedChildren(NamedTuple):
    """The best F tokens of each row, best first, on the host."""

    tokens: Int32Array  # [rows, fan_out]
    log_probs: Float32Array  # [rows, fan_out], of the calibrated distribution
    scores: Float32Array  # [rows, fan_out], as given
    expected_score: Float32Array  # [rows], mean score under the calibrated distribution


class _Room:
    """Arrays of a call of at most `rows` rows, made once with their addresses: asking for those takes longer
    than filling them."""

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


class NativeRanking:
    """Ranks rows of float32 logits on the CPU. Of equal scores the lowest token comes first. Not safe for use
    by several threads."""

    def __init__(self, library: NativeLibrary) -> None:
        shape = POINTER, SIZE, SIZE
        self._rank = library.function(
            "ssd_rank", *shape, *(POINTER,) * 4, SIZE, *(POINTER,) * 4, INT, result=INT
        )
        self._room = _Room(0, 0)

    def rank(
        self,
        logits: torch.Tensor,
        temperatures: Sequence[float],
        table: torch.Tensor,
        lines: Sequence[int],
        scales: Sequence[float],
        fan_out: int,
    ) -> RankedChildren:
        """The best `fan_out` tokens of each row of `logits` [rows, vocabulary]. Line `lines[row]` of `table`
        [lines, vocabulary] is the row's noise; line 0: it has none, and temperature 0 is as 1.

        Raises `MemoryError`.
        """
        rows, vocabulary = logits.shape
        if not 0 < fan_out <= vocabulary or table.shape[1] != vocabulary:
            raise ValueError(f"cannot rank {fan_out} of {vocabulary} tokens with noise of {table.shape[1]}")
        room = self._room
        if rows > room.rows or fan_out != room.fan_out:
            room = self._room = _Room(max(64, rows), fan_out)
        logits = logits.contiguous()
        room.temperatures[:rows], room.scales[:rows], room.lines[:rows] = temperatures, scales, lines
        done = self._rank(
            logits.data_ptr(),
            rows,
            vocabulary,
            room.temperatures_at,
            table.data_ptr(),
            *room.inputs_at,
            fan_out,
            *room.results_at,
            torch.get_num_threads(),
        )
        if not done:
            raise MemoryError("there is no memory left to rank tokens; run fewer requests at once")
        return RankedChildren(
            room.tokens[:rows].copy(),
            room.log_probs[:rows].copy(),
            room.scores[:rows].copy(),
            room.means[:rows].copy(),
        )
