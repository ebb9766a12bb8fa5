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


class NativeRanking:
    """Ranks rows of float32 logits on the CPU. Of equal scores the lowest token comes first."""

    def __init__(self, library: NativeLibrary) -> None:
        shape = POINTER, SIZE, SIZE
        self._rank = library.function(
            "ssd_rank", *shape, *(POINTER,) * 4, SIZE, *(POINTER,) * 4, INT, result=INT
        )

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
        logits = logits.contiguous()
        divisors = np.array([each or 1.0 for each in temperatures], np.float32)
        inverses = np.float32(1.0) / np.array(scales, np.float32)
        where = np.array(lines, np.int64)
        # Log-probabilities and scores lie in one array: each costs time to make and to point at.
        reals = np.empty((2, rows, fan_out), np.float32)
        tokens, means = np.full((rows, fan_out), -1, np.int32), np.empty(rows, np.float32)
        at = reals.ctypes.data
        done = self._rank(
            logits.data_ptr(),
            rows,
            vocabulary,
            divisors.ctypes.data,
            table.data_ptr(),
            where.ctypes.data,
            inverses.ctypes.data,
            fan_out,
            tokens.ctypes.data,
            at,
            at + reals.nbytes // 2,
            means.ctypes.data,
            torch.get_num_threads(),
        )
        if not done:
            raise MemoryError("there is no memory left to rank tokens; run fewer requests at once")
        return RankedChildren(tokens, reals[0], reals[1], means)
