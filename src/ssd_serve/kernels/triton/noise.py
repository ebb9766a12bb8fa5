"""Rows of log E on a GPU, by one launch. Knows one table; no cache of rows, no requests.

The integers are those of `sampling.noise`; logarithms are the device's own in float64, rounded to float32.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import triton

from ssd_serve.kernels.triton.noise_kernel import fill_noise

BLOCKS = 256
"""Philox blocks of a program, of four tokens each."""
_MASK_32 = 0xFFFFFFFF


class TritonNoise:
    """log E into the rows of a float32 table [lines, vocabulary] on the GPU."""

    def fill(
        self,
        table: torch.Tensor,
        lines: Sequence[int],
        keys: Sequence[tuple[int, int]],
        stream: int = 0,
    ) -> None:
        """Write the noise of each pair of seed and position into its line; the host does not wait for it."""
        words = [
            (seed & _MASK_32, seed >> 32 & _MASK_32, position & _MASK_32, stream & _MASK_32)
            for seed, position in keys
        ]
        numbers = torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32))
        into = torch.tensor(lines, dtype=torch.int64).to(table.device, non_blocking=True)
        vocabulary = table.shape[1]
        blocks = triton.cdiv(triton.cdiv(vocabulary, 4), BLOCKS)
        cast(Any, fill_noise)[len(keys), blocks](
            table, into, numbers.to(table.device, non_blocking=True), vocabulary, BLOCKS=BLOCKS
        )
