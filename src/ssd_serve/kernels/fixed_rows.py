"""Running a function of rows so that a row's result does not depend on other rows, to the bit.

Kernels are chosen by the number of rows, and with the kernel the order of additions. So rows are computed in
blocks of one fixed number, the last one padded. Where every smaller number proves to give the same bits the
last block stays as small as it is. On CPUs the number of threads must not matter either. Knows functions of
tensors; no model.
"""

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ssd_serve.base.errors import UserError

Function = Callable[..., torch.Tensor]
"""Tensors [rows, ...] -> [rows, ...], row by row; it may write to what it is given."""

_CPU_ROWS, _GPU_ROWS = 16, 64
"""On GPUs a product of up to 64 rows costs what reading the weights costs."""
_DISTINCT = 512
"""Outputs of a trial matrix that differ; more would take long to draw."""


@dataclass(frozen=True, slots=True)
class BlockForm:
    """Runs functions in blocks of `rows`, the last one padded or not, on a single thread or all."""

    rows: int
    padded: bool = True
    single: bool = False

    def run(self, function: Function, *tensors: torch.Tensor) -> torch.Tensor:
        """`function` of tensors [rows, ...], any number of rows."""
        if self.single:
            with threads(1):
                return self._run(function, *tensors)
        return self._run(function, *tensors)

    def _run(self, function: Function, *tensors: torch.Tensor) -> torch.Tensor:
        count = len(tensors[0])
        missing = -count % self.rows if self.padded else 0
        if missing:
            tensors = tuple(_padded(each, missing) for each in tensors)
        if count <= self.rows:
            return function(*tensors)[:count]
        blocks = zip(*(torch.split(each, self.rows) for each in tensors), strict=True)
        return torch.cat([function(*block) for block in blocks])[:count]


def rows_of_block(device: str) -> int:
    """The number of rows of a block on this device."""
    return _CPU_ROWS if device == "cpu" else _GPU_ROWS


def product_ways(device: str) -> list[BlockForm]:
    """Return the ways to run products, the cheapest first."""
    rows = rows_of_block(device)
    if device != "cpu":
        return [BlockForm(rows)]
    return [BlockForm(rows, padded=False), BlockForm(rows), BlockForm(rows, single=True)]


def operation_way(device: str) -> BlockForm:
    """Return the way to run norms, rotations and gates. Several threads would split rows by their number."""
    return BlockForm(rows_of_block(device), single=device == "cpu")


def settle(
    function: Function, samples: tuple[torch.Tensor, ...], ways: Sequence[BlockForm], what: str
) -> BlockForm:
    """The first way in which a row's result is the same alone, at every place and with any threads.

    `samples` are tensors [rows of a block, ...]. Raises `UserError`, naming `what`, where there is none.
    """
    for way in ways:
        if _holds(way, function, samples):
            return way
    raise UserError(
        f"SSD_BATCH_INVARIANT cannot be had here: {what} depends on a row's place among {len(samples[0])} "
        "rows; use another SSD_DTYPE, on CPUs SSD_NATIVE_KERNELS=true and a C compiler, or "
        "SSD_BATCH_INVARIANT=false"
    )


def trial_product(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [outputs, inputs] and rows [rows, inputs] with products of zero, except for rounding.

    The results then depend on the order of additions only. In other products, rounding to 16 bits would
    usually hide that order.
    """
    generator = torch.Generator().manual_seed(0)

    def cancelling(count: int, sign: int) -> torch.Tensor:
        half = torch.randn((count, inputs // 2), generator=generator)
        powers = torch.randint(-5, 6, half.shape, generator=generator)  # far apart: more of them is rounded
        half = torch.ldexp(half, powers).to(dtype)
        return torch.cat((half, sign * half, half.new_zeros((count, inputs % 2))), dim=1)

    order = torch.randperm(inputs, generator=generator)
    weight = cancelling(min(outputs, _DISTINCT), -1)[:, order]
    return weight.repeat(-(-outputs // len(weight)), 1)[:outputs], cancelling(rows, 1)[:, order]


@contextmanager
def threads(number: int) -> Generator[None]:
    """Compute with so many threads for a while."""
    before = torch.get_num_threads()
    if before == number:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _holds(way: BlockForm, function: Function, samples: tuple[torch.Tensor, ...]) -> bool:
    """Return True if this way gives every row the bits that it has in the full block on one thread."""
    rows = len(samples[0])
    with threads(1):
        right = way.run(function, *(each.clone() for each in samples))
    for number in _thread_counts(samples[0].device.type):
        with threads(number):
            for turn in range(rows):
                turned = tuple(each.roll(turn, 0) for each in samples)
                if not torch.equal(way.run(function, *turned), right.roll(turn, 0)):
                    return False
            for count in (1,) if way.padded else range(1, rows):
                some = tuple(each[:count].clone() for each in samples)
                if not torch.equal(way.run(function, *some), right[:count]):
                    return False
    return True


def _thread_counts(device: str) -> list[int]:
    most = (os.cpu_count() or 1) if device == "cpu" else 1
    return sorted({1, most, *(1 << power for power in range(most.bit_length()))})


def _padded(tensor: torch.Tensor, missing: int) -> torch.Tensor:
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing))
