"""Rows of log E by the compiled kernel. Knows one function; no cache, no requests."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from ssd_serve.kernels.native.library import POINTER, SIZE, NativeLibrary

_MASK_64 = (1 << 64) - 1


class NativeNoise:
    """log E into the rows of a float32 table [lines, vocabulary] on the CPU.

    The integers are those of `sampling.noise.integers_rows`. Logarithms are the kernel's own, in float64 to
    about one unit in the last place; rounded to float32 they are numpy's but for about one word in 10^8.
    """

    def __init__(self, library: NativeLibrary) -> None:
        self._fill = library.function(
            "ssd_log_exponential", POINTER, POINTER, SIZE, SIZE, ctypes.c_uint32, POINTER, POINTER
        )

    def fill(
        self,
        table: torch.Tensor,
        lines: Sequence[int],
        keys: Sequence[tuple[int, int]],
        stream: int = 0,
    ) -> None:
        """Write the noise of each pair of seed and position into its line."""
        seeds = np.array([seed & _MASK_64 for seed, _ in keys], dtype=np.uint64)
        positions = np.array([position for _, position in keys], dtype=np.int64)
        into = np.array(lines, dtype=np.int64)
        self._fill(
            seeds.ctypes.data,
            positions.ctypes.data,
            len(keys),
            table.shape[1],
            stream & 0xFFFFFFFF,
            table.data_ptr(),
            into.ctypes.data,
        )
