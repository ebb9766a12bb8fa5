"""Cache of noise rows on the device that chooses tokens, and the kernels that fill it.

The numbers are defined by `sampling.noise`.
"""

import ctypes
import logging
from collections import OrderedDict
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ssd_serve.kernels.native.library import POINTER, SIZE, NativeLibrary
from ssd_serve.sampling.noise import log_exponential, log_exponential_torch

logger = logging.getLogger(__name__)

BLOCK = 8
"""Positions of noise computed together."""


def capacity_for(vocabulary: int, memory_bytes: int = 64 << 20) -> int:
    """Rows of noise that fit into `memory_bytes`, at least enough for one large tree."""
    return max(64, memory_bytes // (4 * vocabulary))


_MASK_64 = (1 << 64) - 1


class NativeNoise:
    """Writes log E into rows of a float32 table [lines, vocabulary] on the CPU.

    The integers equal those of `noise.random_words`. Logarithms are the kernel's own, in float64 to about
    one unit in the last place. Rounded to float32 they equal numpy's but for about one word in 10^8.
    """

    def __init__(self, library: NativeLibrary) -> None:
        self._fill = library.function(
            "ssd_log_exponential", POINTER, POINTER, SIZE, SIZE, ctypes.c_uint32, POINTER, POINTER
        )

    def fill(self, table: torch.Tensor, lines: Sequence[int], keys: Sequence[tuple[int, int]]) -> None:
        seeds = np.array([seed & _MASK_64 for seed, _ in keys], dtype=np.uint64)
        positions = np.array([position for _, position in keys], dtype=np.int64)
        into = np.array(lines, dtype=np.int64)
        self._fill(
            seeds.ctypes.data,
            positions.ctypes.data,
            len(keys),
            table.shape[1],
            0,
            table.data_ptr(),
            into.ctypes.data,
        )


class NoiseKernel(Protocol):
    """A kernel that fills rows of log E in place."""

    def fill(self, table: torch.Tensor, lines: Sequence[int], keys: Sequence[tuple[int, int]]) -> None:
        """Write the noise of each pair of seed and position into its line of `table` [lines, vocabulary]."""
        ...


def noise_kernel(device: torch.device, native: NativeLibrary | None) -> NoiseKernel | None:
    """The kernel of this device, if there is one and it passes its self-test. A failure is logged."""
    if device.type == "cpu":
        return None if native is None else _checked(NativeNoise(native), device)
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    try:
        from ssd_serve.kernels.triton import keep_private
        from ssd_serve.kernels.triton.noise import TritonNoise

        keep_private()
        return _checked(TritonNoise(), device)
    except Exception as error:  # Triton's compiler may raise anything
        logger.warning("the Triton noise kernel cannot be used, PyTorch computes the noise: %r", error)
        return None


def _checked(kernel: NoiseKernel, device: torch.device) -> NoiseKernel | None:
    keys, vocabulary = [(0, 0), ((1 << 64) - 1, 7), (12345, 1 << 20)], 333
    table = torch.full((len(keys), vocabulary), torch.nan, device=device)
    kernel.fill(table, range(len(keys)), keys)
    expected = log_exponential([seed for seed, _ in keys], [position for _, position in keys], vocabulary)
    found = table.cpu().numpy()
    if np.allclose(found, expected, rtol=2e-7, atol=1e-7):
        return kernel
    logger.warning(
        "the noise kernel %s failed its self-test and is not used: it differs from numpy by up to %g",
        type(kernel).__name__,
        float(np.max(np.abs(found - expected))),
    )
    return None


class NoiseRows:
    """An LRU cache of at most `capacity` rows of log E (4 * vocabulary bytes each).

    Rows live on `device` and are computed by the device's kernel if there is one. A row of seed None is
    zero: a choice without noise (temperature 0). Not thread-safe.
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
        """float32 [1 + capacity, vocabulary]; line 0 is zero, `lines` assigns the others."""
        self.table[0].zero_()
        self._kernel = noise_kernel(self.device, native)
        self._line_of: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._last: tuple[list[tuple[int, int, int]], list[list[int]]] = [], []
        """Arguments and result of the last call of `lines`: rows computed ahead are requested next."""

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
        where = self._line_of
        return [0 if seed is None else where[seed, position] for seed, position in keys]

    def lines(self, spans: Sequence[tuple[int, int, int]]) -> list[list[int]] | None:
        """Lines of `table` that hold the rows of each span (seed, first position, number of positions).

        Missing rows are computed, so that a call can also compute ahead. Lines are valid until the next
        call. Returns None if the rows exceed the capacity.
        """
        if spans == self._last[0]:
            return self._last[1]
        total = sum(count for _, _, count in spans)
        if total > self.capacity:
            distinct = {(seed, first + index) for seed, first, count in spans for index in range(count)}
            if len(distinct) > self.capacity:
                return None
        where, missing = self._line_of, _Missing([], [])
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
        """Assign a line to this row, evicting the least recently used row if the table is full."""
        where = self._line_of
        line = len(where) + 1 if len(where) < self.capacity else where.popitem(last=False)[1]
        where[key] = line
        missing.keys.append(key)
        missing.lines.append(line)
        return line

    def _compute(self, missing: "_Missing", wanted: int) -> None:
        """Fill the lines of missing rows, which belong to `wanted` rows in use."""
        try:
            if self._kernel is not None:
                self._kernel.fill(self.table, missing.lines, missing.keys)
            else:
                if wanted + BLOCK * len(missing.keys) <= self.capacity:  # nothing that is wanted now may go
                    self._add_neighbours(missing)
                for line, value in zip(missing.lines, self._values(missing.keys), strict=True):
                    self.table[line].copy_(value)
        except BaseException:
            self._line_of.clear()  # some lines may not hold their recorded keys
            self._last = [], []
            raise

    def _add_neighbours(self, missing: "_Missing") -> None:
        """Complete blocks of positions: they are needed soon, and in numpy eight rows at once cost a third
        of eight single ones."""
        blocks = dict.fromkeys((seed, at // BLOCK) for seed, at in missing.keys)
        for seed, block in blocks:
            for position in range(BLOCK * block, BLOCK * block + BLOCK):
                if (seed, position) not in self._line_of:
                    self._add((seed, position), missing)

    def _values(self, keys: Sequence[tuple[int, int]]) -> torch.Tensor:
        seeds, positions = [seed for seed, _ in keys], [position for _, position in keys]
        if self.device.type == "cpu":
            return torch.from_numpy(log_exponential(seeds, positions, self.vocabulary))
        return log_exponential_torch(seeds, positions, self.vocabulary, self.device)


class _Missing(NamedTuple):
    keys: list[tuple[int, int]]
    lines: list[int]
