# pyright: basic, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Philox4x32-10 and the race of exponentials in Triton: the numbers of `sampling.noise`, four tokens a block.

Knows pointers and words, not requests.
"""

import triton
import triton.language as tl


@triton.jit
def philox_round(word_0, word_1, word_2, word_3, key_0, key_1):
    """One of the ten rounds of Philox4x32-10 (Salmon et al., SC 2011)."""
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
