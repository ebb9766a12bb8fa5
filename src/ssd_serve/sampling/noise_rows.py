"""Rows of the shared noise that are wanted again: the least recently used ones, on the device that chooses.

Knows who computes rows on which device; the numbers are `sampling.noise`'s.
"""

import ctypes
from collections import OrderedDict
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ssd_serve.kernels.native.library import POINTER, SIZE, NativeLibrary
from ssd_serve.sampling.noise import log_exponential, log_exponential_torch

BLOCK = 8
"""Positions whose noise is computed together."""


def capacity_for(vocabulary: int, memory_bytes: int = 64 << 20) -> int:
    """Rows of noise that fit into `memory_bytes`, at least enough for one large tree."""
    return max(64, memory_bytes // (4 * vocabulary))


_MASK_64 = (1 << 64) - 1


class NativeNoise:
    """log E into the rows of a float32 table [lines, vocabulary] on the CPU.

    The integers are those of `sampling.noise.random_words`. Logarithms are the kernel's own, in float64 to
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


class NoiseKernel(Protocol):
    """A kernel that makes rows of log E in place."""

    def fill(self, table: torch.Tensor, lines: Sequence[int], keys: Sequence[tuple[int, int]]) -> None:
        """Write the noise of each pair of seed and position into its line of `table` [lines, vocabulary]."""
        ...


def _filler(device: torch.device, native: NativeLibrary | None) -> NoiseKernel | None:
    """The kernel for this device, where there is one and its rows are numpy's up to the last bit."""
    if device.type == "cpu":
        return None if native is None else _trusted(NativeNoise(native), device)
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    try:
        from ssd_serve.kernels.triton.factory import keep_private
        from ssd_serve.kernels.triton.noise import TritonNoise

        keep_private()
        return _trusted(TritonNoise(), device)
    except Exception:  # such as no C compiler, which tree attention tells of; torch makes the same rows
        return None


def _trusted(filler: NoiseKernel, device: torch.device) -> NoiseKernel | None:
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
        indices = self.lines_of(seeds, positions)
        if indices is None:  # too many to remember at once: in parts
            half = len(seeds) // 2
            parts = (slice(None, half), slice(half, None))
            return torch.cat([self.rows(seeds[part], positions[part]) for part in parts])
        return self.table.index_select(0, torch.tensor(indices, dtype=torch.int64).to(self.device))

    def lines_of(self, seeds: Sequence[int | None], positions: Sequence[int]) -> list[int] | None:
        """The line of `table` of each pair of seed and position, as `lines` finds it; 0 for seed None."""
        keys = list(zip(seeds, positions, strict=True))
        distinct = dict.fromkeys(keys)
        if self.lines([(seed, position, 1) for seed, position in distinct if seed is not None]) is None:
            return None
        where = self._where
        return [0 if seed is None else where[seed, position] for seed, position in keys]

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
