"""Shared noise: a unit exponential E(seed, position, token) that every process can compute by itself.

The integers come from Philox4x32-10, a counter-based generator. Source: Salmon, Moraes, Dror, Shaw,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011 (the Random123 library). Key: the 64-bit seed, low
word first. Counter: (position, token // 4, 0, 0). A block of four words serves four neighbouring
tokens: token v takes lane v % 4.

The integers are identical everywhere, logarithms are not. So a row is always computed whole, in float64, by
one function for each kind of device, and only the target's device decides tokens. That function is the
device's kernel, else numpy or torch. Between them about one word in 10^8 differs, in the last bit of a
float32.

This module knows nothing of logits, requests or sampling parameters.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ssd_serve.kernels.batch import UInt64Array

UInt32Array = npt.NDArray[np.uint32]
Float32Array = npt.NDArray[np.float32]

MASK_32 = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LARGEST_UNIFORM = 1.0 - 2.0**-24
GROUP_BLOCKS = 16384
"""Philox blocks computed together: the work arrays fit a core's second-level cache."""


def philox(counters: UInt64Array, keys: UInt64Array) -> UInt64Array:
    """Philox4x32-10 of many counters.

    `counters` is uint64 [4, rows, blocks], 32-bit words, broadcastable in its last two axes; `keys` is uint64
    [2, rows, 1]. Returns uint64 [4, rows, blocks] of 32-bit words.
    """
    mask, shift = np.uint64(MASK_32), np.uint64(32)
    multipliers = np.array(MULTIPLIERS, dtype=np.uint64).reshape(2, 1, 1)
    weyl = np.array(WEYL, dtype=np.uint64).reshape(2, 1, 1)
    even = counters[0::2].copy()  # words 0 and 2: [2, rows, blocks]
    odd = counters[1::2]  # words 1 and 3; their upper halves are left dirty between rounds
    key = keys
    product, other = np.empty_like(even), np.empty_like(even)
    for turn in range(ROUNDS):
        if turn:
            key = (key + weyl) & mask
        np.multiply(even, multipliers, out=product)
        np.right_shift(product[::-1], shift, out=even)
        np.bitwise_xor(even, odd, out=even)
        np.bitwise_xor(even, key, out=even)
        np.bitwise_and(even, mask, out=even)
        odd, product, other = product[::-1], other, product
    result = np.empty((4, *even.shape[1:]), dtype=np.uint64)
    result[0::2] = even
    np.bitwise_and(odd, mask, out=result[1::2])
    return result


def random_words(seeds: Sequence[int], positions: Sequence[int], vocabulary: int) -> UInt32Array:
    """Random words of whole rows: uint32 [rows, vocabulary] for pairs of seed and position."""
    blocks = (vocabulary + 3) // 4
    result = np.empty((len(seeds), blocks, 4), dtype=np.uint32)
    group = max(1, GROUP_BLOCKS // blocks)
    keys = np.array([[seed & MASK_32, (seed >> 32) & MASK_32] for seed in seeds], dtype=np.uint64)
    where = np.array([position & MASK_32 for position in positions], dtype=np.uint64)
    for start in range(0, len(seeds), group):
        rows = slice(start, start + group)
        counters = np.zeros((4, len(where[rows]), blocks), dtype=np.uint64)
        counters[0] = where[rows, None]
        counters[1] = np.arange(blocks, dtype=np.uint64)
        words = philox(counters, keys[rows].T[:, :, None])  # [4, rows, blocks]
        result[rows] = words.transpose(1, 2, 0)
    return result.reshape(len(seeds), blocks * 4)[:, :vocabulary]


def random_words_torch(
    seeds: Sequence[int], positions: Sequence[int], vocabulary: int, device: torch.device | str
) -> torch.Tensor:
    """The same words as `random_words`, computed on `device`: int64 [rows, vocabulary].

    Products of 32-bit words wrap around in signed 64-bit integers, but their bits are right.
    """
    blocks = (vocabulary + 3) // 4
    keys = torch.tensor([[s & MASK_32, (s >> 32) & MASK_32] for s in seeds], dtype=torch.int64).to(device)
    key_0, key_1 = keys[:, :1], keys[:, 1:]  # [rows, 1]
    where = torch.tensor([p & MASK_32 for p in positions], dtype=torch.int64).to(device)
    word_0 = where[:, None].expand(-1, blocks)  # [rows, blocks]
    word_1 = torch.arange(blocks, device=device).expand(len(seeds), -1)
    word_2 = word_3 = torch.zeros_like(word_1)
    for turn in range(ROUNDS):
        if turn:
            key_0, key_1 = (key_0 + WEYL[0]) & MASK_32, (key_1 + WEYL[1]) & MASK_32
        product_0, product_1 = word_0 * MULTIPLIERS[0], word_2 * MULTIPLIERS[1]
        word_0, word_1 = ((product_1 >> 32) ^ word_1 ^ key_0) & MASK_32, product_1 & MASK_32
        word_2, word_3 = ((product_0 >> 32) ^ word_3 ^ key_1) & MASK_32, product_0 & MASK_32
    words = torch.stack((word_0, word_1, word_2, word_3), dim=-1)  # [rows, blocks, 4]
    return words.reshape(len(seeds), blocks * 4)[:, :vocabulary]


def log_exponential(seeds: Sequence[int], positions: Sequence[int], vocabulary: int) -> Float32Array:
    """log E for pairs of seed and position: float32 [rows, vocabulary], finite everywhere."""
    return log_exponential_of_words(random_words(seeds, positions, vocabulary))


def log_exponential_of_words(words: UInt32Array) -> Float32Array:
    """log E of random words h, elementwise: uint32 [...] -> float32 [...].

    E = -log1p(-w), w = (h + 0.5) * 2^-32, at most 1 - 2^-24. In float64 h + 0.5 and w are exact, so that
    small E keep their full resolution. Small E win the race among improbable tokens. Only log E is rounded.
    """
    values = words.astype(np.float64)
    values += 0.5
    values *= 2.0**-32
    np.minimum(values, LARGEST_UNIFORM, out=values)
    np.negative(values, out=values)
    np.log1p(values, out=values)
    np.negative(values, out=values)
    np.log(values, out=values)
    return values.astype(np.float32)


def log_exponential_torch(
    seeds: Sequence[int], positions: Sequence[int], vocabulary: int, device: torch.device | str
) -> torch.Tensor:
    """log E computed on `device`: float32 [rows, vocabulary]. Logarithms may differ from numpy's last bit."""
    words = random_words_torch(seeds, positions, vocabulary, device)
    uniform = (words.to(torch.float64) + 0.5).mul_(2.0**-32).clamp_(max=LARGEST_UNIFORM)
    return uniform.neg_().log1p_().neg_().log_().to(torch.float32)
