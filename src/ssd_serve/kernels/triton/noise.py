# pyright: basic, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Rows of log E on a GPU, by one launch. Knows one table; no cache of rows, no requests.

The integers are those of `sampling.noise`; logarithms are the device's own in float64, rounded to float32.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import triton
import triton.language as tl

BLOCKS = 256
"""Philox blocks of a program, of four tokens each."""
_MASK_32 = 0xFFFFFFFF


class TritonNoise:
    """log E into the rows of a float32 table [lines, vocabulary] on the GPU."""

    def fill(self, table: torch.Tensor, lines: Sequence[int], keys: Sequence[tuple[int, int]]) -> None:
        """Write the noise of each pair of seed and position into its line; the host does not wait for it."""
        words = [(seed & _MASK_32, seed >> 32 & _MASK_32, position & _MASK_32, 0) for seed, position in keys]
        numbers = torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32))
        into = torch.tensor(lines, dtype=torch.int64).to(table.device, non_blocking=True)
        vocabulary = table.shape[1]
        blocks = triton.cdiv(triton.cdiv(vocabulary, 4), BLOCKS)
        cast(Any, fill_noise)[len(keys), blocks](
            table, into, numbers.to(table.device, non_blocking=True), vocabulary, BLOCKS=BLOCKS
        )


@triton.jit
def philox_round(word_0, word_1, word_2, word_3, key_0, key_1):
    """Compute one of the ten rounds of Philox4x32-10 (Salmon et al., SC 2011)."""
    high_0, high_2 = tl.umulhi(word_0, 0xD2511F53), tl.umulhi(word_2, 0xCD9E8D57)
    low_0, low_2 = word_0 * 0xD2511F53, word_2 * 0xCD9E8D57
    return high_2 ^ word_1 ^ key_0, low_2, high_0 ^ word_3 ^ key_1, low_0


@triton.jit
def store_race(table, token, word, vocabulary):
    """log E of random words: E = -log1p(-w), w = (h + 0.5) * 2^-32 clamped to 1 - 2^-24."""
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    left = 1.0 - tl.minimum(uniform, 0.999999940395355224609375)  # exact in float64
    tl.store(table + token, tl.log(-tl.log(left)).to(tl.float32), mask=token < vocabulary)


@triton.jit
def fill_noise(table, lines, counters, vocabulary, BLOCKS: tl.constexpr):
    """Program (row, part of the vocabulary): log E of one pair of seed and position.

    `table` float32 [lines, vocabulary], `lines` int64 [rows], `counters` uint32 in int32 [rows, 4]: both
    halves of the seed, low first, the position and the stream.
    """
    row = tl.program_id(0)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    zero = (block * 0).to(tl.uint32)
    key_0 = tl.load(counters + 4 * row).to(tl.uint32, bitcast=True)
    key_1 = tl.load(counters + 4 * row + 1).to(tl.uint32, bitcast=True)
    word_0 = zero + tl.load(counters + 4 * row + 2).to(tl.uint32, bitcast=True)
    word_1, word_3 = block.to(tl.uint32), zero
    word_2 = zero + tl.load(counters + 4 * row + 3).to(tl.uint32, bitcast=True)
    for _ in tl.static_range(9):
        word_0, word_1, word_2, word_3 = philox_round(word_0, word_1, word_2, word_3, key_0, key_1)
        key_0, key_1 = key_0 + 0x9E3779B9, key_1 + 0xBB67AE85
    word_0, word_1, word_2, word_3 = philox_round(word_0, word_1, word_2, word_3, key_0, key_1)
    line = table + tl.load(lines + row) * vocabulary
    store_race(line, 4 * block, word_0, vocabulary)
    store_race(line, 4 * block + 1, word_1, vocabulary)
    store_race(line, 4 * block + 2, word_2, vocabulary)
    store_race(line, 4 * block + 3, word_3, vocabulary)
