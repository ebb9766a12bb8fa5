"""Shared noise: a unit exponential E(seed, position, token) that every process can compute by itself.

The integers come from Philox4x32-10, a counter-based generator (Salmon, Moraes, Dror, Shaw, "Parallel random
numbers: as easy as 1, 2, 3", SC 2011; the Random123 library). Key: the 64-bit seed, low word first. Counter:
(position, token // 4, stream, 0). The four words of a block belong to four neighbouring tokens: token v takes
lane v % 4, so that one block serves four tokens.

The integers are identical everywhere, logarithms are not: a row is always computed whole, by the same
function for a kind of device, in float64, and only the target's device decides tokens. That is the kernel for
the device where there is one, else numpy or torch: between those about one word in 10^8 differs, in the last
bit of a float32.

This module knows nothing of logits, requests or sampling parameters.
"""

from collections import OrderedDict
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ssd_serve.kernels.batch import UInt64Array
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.native.noise import NativeNoise
from ssd_serve.seeds import choice_seed, mix

__all__ = [
    "NoiseRows",
    "capacity_for",
    "choice_seed",
    "integers",
    "integers_rows",
    "integers_torch",
    "integers_torch_rows",
    "log_exponential",
    "log_exponential_torch",
    "mix",
    "philox",
    "race",
]

UInt32Array = npt.NDArray[np.uint32]
Float32Array = npt.NDArray[np.float32]

MASK_32 = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LARGEST_UNIFORM = 1.0 - 2.0**-24
BLOCK = 8
"""Positions whose noise is computed together."""
GROUP_BLOCKS = 16384
"""Philox blocks computed together: few enough that the work arrays stay in a core's second-level cache."""


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


def integers_rows(
    seeds: Sequence[int], positions: Sequence[int], vocabulary: int, stream: int = 0
) -> UInt32Array:
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
        counters[2] = stream & MASK_32
        words = philox(counters, keys[rows].T[:, :, None])  # [4, rows, blocks]
        result[rows] = words.transpose(1, 2, 0)
    return result.reshape(len(seeds), blocks * 4)[:, :vocabulary]


def integers(seed: int, position: int, vocabulary: int, stream: int = 0) -> UInt32Array:
    """Random words of one row: uint32 [vocabulary]."""
    return integers_rows([seed], [position], vocabulary, stream).reshape(vocabulary)


def integers_torch_rows(
    seeds: Sequence[int],
    positions: Sequence[int],
    vocabulary: int,
    device: torch.device | str,
    stream: int = 0,
) -> torch.Tensor:
    """The same words as `integers_rows`, computed on `device`: int64 [rows, vocabulary].

    Products of 32-bit words wrap around in signed 64-bit integers, but their bits are right.
    """
    blocks = (vocabulary + 3) // 4
    keys = torch.tensor([[s & MASK_32, (s >> 32) & MASK_32] for s in seeds], dtype=torch.int64).to(device)
    key_0, key_1 = keys[:, :1], keys[:, 1:]  # [rows, 1]
    where = torch.tensor([p & MASK_32 for p in positions], dtype=torch.int64).to(device)
    word_0 = where[:, None].expand(-1, blocks)  # [rows, blocks]
    word_1 = torch.arange(blocks, device=device).expand(len(seeds), -1)
    word_2 = torch.full_like(word_1, stream & MASK_32)
    word_3 = torch.zeros_like(word_1)
    for turn in range(ROUNDS):
        if turn:
            key_0, key_1 = (key_0 + WEYL[0]) & MASK_32, (key_1 + WEYL[1]) & MASK_32
        product_0, product_1 = word_0 * MULTIPLIERS[0], word_2 * MULTIPLIERS[1]
        word_0, word_1 = ((product_1 >> 32) ^ word_1 ^ key_0) & MASK_32, product_1 & MASK_32
        word_2, word_3 = ((product_0 >> 32) ^ word_3 ^ key_1) & MASK_32, product_0 & MASK_32
    words = torch.stack((word_0, word_1, word_2, word_3), dim=-1)  # [rows, blocks, 4]
    return words.reshape(len(seeds), blocks * 4)[:, :vocabulary]


def integers_torch(
    seed: int, position: int, vocabulary: int, device: torch.device | str, stream: int = 0
) -> torch.Tensor:
    """The same words as `integers`, computed on `device`: int64 [vocabulary]."""
    return integers_torch_rows([seed], [position], vocabulary, device, stream)[0]


def log_exponential(
    seeds: Sequence[int], positions: Sequence[int], vocabulary: int, stream: int = 0
) -> Float32Array:
    """log E for pairs of seed and position: float32 [rows, vocabulary], finite everywhere."""
    return race(integers_rows(seeds, positions, vocabulary, stream))


def race(words: UInt32Array) -> Float32Array:
    """log E of random words h, elementwise: uint32 [...] -> float32 [...].

    E = -log1p(-w), w = (h + 0.5) * 2^-32, at most 1 - 2^-24. In float64 h + 0.5 and w are exact, so small E
    (the winners of the race among improbable tokens) keep their full resolution; only log E is rounded.
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
    seeds: Sequence[int],
    positions: Sequence[int],
    vocabulary: int,
    device: torch.device | str,
    stream: int = 0,
) -> torch.Tensor:
    """log E computed on `device`: float32 [rows, vocabulary]. Logarithms may differ from numpy's last bit."""
    words = integers_torch_rows(seeds, positions, vocabulary, device, stream)
    uniform = (words.to(torch.float64) + 0.5).mul_(2.0**-32).clamp_(max=LARGEST_UNIFORM)
    return uniform.neg_().log1p_().neg_().log_().to(torch.float32)


def capacity_for(vocabulary: int, memory_bytes: int = 64 << 20) -> int:
    """Rows of noise that fit into `memory_bytes`, at least enough for one large tree."""
    return max(64, memory_bytes // (4 * vocabulary))


class Filler(Protocol):
    """A kernel that makes rows of log E in place."""

    def fill(self, table: torch.Tensor, lines: Sequence[int], keys: Sequence[tuple[int, int]]) -> None:
        """Write the noise of each pair of seed and position into its line of `table` [lines, vocabulary]."""
        ...


def _filler(device: torch.device, native: NativeLibrary | None) -> Filler | None:
    """The kernel for this device, where there is one and its rows are numpy's up to the last bit."""
    if device.type == "cpu":
        return None if native is None else _trusted(NativeNoise(native), device)
    if find_spec("triton") is None:
        return None
    from ssd_serve.kernels.triton.noise import TritonNoise

    return _trusted(TritonNoise(), device)


def _trusted(filler: Filler, device: torch.device) -> Filler | None:
    keys, vocabulary = [(0, 0), ((1 << 64) - 1, 7), (12345, 1 << 20)], 333
    table = torch.full((len(keys), vocabulary), torch.nan, device=device)
    filler.fill(table, range(len(keys)), keys)
    expected = log_exponential([seed for seed, _ in keys], [position for _, position in keys], vocabulary)
    return filler if np.allclose(table.cpu().numpy(), expected, rtol=2e-7, atol=1e-7) else None


class NoiseRows:
    """The least recently used rows of log E, at most `capacity` of them (4 * vocabulary bytes each).

    Rows live on `device`, where a kernel makes them if there is one: on CPUs that in `native`, on GPUs
    Triton's. A row of seed None is zero: it stands for a choice without noise (temperature 0). Not safe for
    use by several threads.
    """

    def __init__(
        self,
        vocabulary: int,
        capacity: int,
        device: torch.device | str = "cpu",
        native: NativeLibrary | None = None,
    ) -> None:
        if vocabulary < 1 or capacity < 1:
            raise ValueError("noise rows need a vocabulary and a capacity of at least 1")
        self.vocabulary = vocabulary
        self.capacity = capacity
        self.device = torch.device(device)
        self.table = torch.empty(capacity + 1, vocabulary, dtype=torch.float32, device=self.device)
        """[1 + capacity, vocabulary]; line 0 is zero, `lines` tells which others hold what."""
        self.table[0].zero_()
        self._filler = _filler(self.device, native)
        self._where: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._last: tuple[list[tuple[int, int, int]], list[list[int]]] = [], []
        """The last call of `lines` and its answer: what was computed ahead is asked for next."""

    def row(self, seed: int, position: int) -> torch.Tensor:
        """One row: float32 [vocabulary], the caller's own copy."""
        return self.rows([seed], [position])[0]

    def rows(self, seeds: Sequence[int | None], positions: Sequence[int]) -> torch.Tensor:
        """Rows for a forward: float32 [rows, vocabulary], the caller's own copy."""
        keys = list(zip(seeds, positions, strict=True))
        lines = self.lines([(seed, position, 1) for seed, position in keys if seed is not None])
        if lines is None:  # too many to remember at once: in parts
            half = len(seeds) // 2
            parts = (slice(None, half), slice(half, None))
            return torch.cat([self.rows(seeds[part], positions[part]) for part in parts])
        indices = [0 if seed is None else self._where[seed, position] for seed, position in keys]
        return self.table.index_select(0, torch.tensor(indices, dtype=torch.int64).to(self.device))

    def lines(self, spans: Sequence[tuple[int, int, int]]) -> list[list[int]] | None:
        """Lines of `table` that hold the rows of each span (seed, first position, number of positions).

        Missing rows are computed; also a way to compute ahead. They stay until the next call. None when
        these are more rows than are remembered.
        """
        if spans == self._last[0]:
            return self._last[1]
        total = sum(count for _, _, count in spans)
        if total > self.capacity:
            distinct = {(seed, first + index) for seed, first, count in spans for index in range(count)}
            if len(distinct) > self.capacity:
                return None
        where, missing = self._where, _Missing([], [])
        found: list[list[int]] = []
        for seed, first, count in spans:
            lines: list[int] = []
            found.append(lines)
            for position in range(first, first + count):
                key = seed, position
                line = where.get(key)
                if line is None:
                    line = self._add(key, missing)
                else:
                    where.move_to_end(key)
                lines.append(line)
        if missing.keys:
            self._compute(missing, total)
        self._last = list(spans), found
        return found

    def _add(self, key: tuple[int, int], missing: "_Missing") -> int:
        """A line for this row, the least recently used one's if need be."""
        where = self._where
        line = len(where) + 1 if len(where) < self.capacity else where.popitem(last=False)[1]
        where[key] = line
        missing.keys.append(key)
        missing.lines.append(line)
        return line

    def _compute(self, missing: "_Missing", wanted: int) -> None:
        """Fill the lines of missing rows, some of `wanted` ones."""
        try:
            if self._filler is not None:
                self._filler.fill(self.table, missing.lines, missing.keys)
            else:
                if wanted + BLOCK * len(missing.keys) <= self.capacity:  # nothing that is wanted now may go
                    self._add_neighbours(missing)
                for line, value in zip(missing.lines, self._values(missing.keys), strict=True):
                    self.table[line].copy_(value)
        except BaseException:
            self._where.clear()  # some lines do not hold what it says
            self._last = [], []
            raise

    def _add_neighbours(self, missing: "_Missing") -> None:
        """Whole blocks of positions: they are wanted soon, and without the compiled kernel eight rows at once
        cost a third of eight alone."""
        blocks = dict.fromkeys((seed, at // BLOCK) for seed, at in missing.keys)
        for seed, block in blocks:
            for position in range(BLOCK * block, BLOCK * block + BLOCK):
                if (seed, position) not in self._where:
                    self._add((seed, position), missing)

    def _values(self, keys: Sequence[tuple[int, int]]) -> torch.Tensor:
        seeds, positions = [seed for seed, _ in keys], [position for _, position in keys]
        if self.device.type == "cpu":
            return torch.from_numpy(log_exponential(seeds, positions, self.vocabulary))
        return log_exponential_torch(seeds, positions, self.vocabulary, self.device)


class _Missing(NamedTuple):
    """Rows to be computed, and the lines of the table that they are for."""

    keys: list[tuple[int, int]]
    lines: list[int]
