"""Functions of rows in fixed blocks: which way is safe is found out, and what is not safe is refused."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.base.errors import UserError
from ssd_serve.kernels.cpu_products import quantise
from ssd_serve.kernels.fixed_rows import (
    BlockForm,
    operation_way,
    product_ways,
    settle,
    threads,
    trial_product,
)
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.native.products import NativeInt8Matrix, NativeMatrix, has_bf16_products
from ssd_serve.kernels.native.products import can_multiply_int8 as native_multiplies_int8

WAYS = product_ways("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def double(rows: torch.Tensor) -> torch.Tensor:
    return rows * 2


@given(count=st.integers(1, 70), padded=st.booleans(), single=st.booleans())
def test_blocks_compute_every_row_once_in_order(count: int, padded: bool, single: bool) -> None:
    seen: list[int] = []

    def function(rows: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return rows * 2 + more

    rows, more = torch.arange(3.0 * count).view(count, 3), torch.ones(count, 1)
    assert torch.equal(BlockForm(16, padded, single).run(function, rows, more), rows * 2 + 1)
    blocks = math.ceil(count / 16)
    assert seen == ([16] * blocks if padded else [16] * (blocks - 1) + [count - 16 * (blocks - 1)])


def test_thread_count_is_restored() -> None:
    before = torch.get_num_threads()
    with threads(before + 1):
        assert torch.get_num_threads() == before + 1
        with threads(before):
            assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before


def test_settle_pads_functions_that_depend_on_row_count() -> None:
    """A stand-in for libraries that choose another kernel for few rows."""
    weight, rows = trial_product(16, 64, 96, torch.bfloat16)

    def product(x: torch.Tensor) -> torch.Tensor:
        parts = 2 if len(x) < 5 else 1
        return sum(
            (a.float() @ b.float().T for a, b in zip(x.chunk(parts, 1), weight.chunk(parts, 1), strict=True)),
            torch.zeros(()),
        ).to(x.dtype)

    assert settle(product, (rows,), [BlockForm(16, padded=False), BlockForm(16)], "it").padded


def test_settle_refuses_functions_that_depend_on_row_place() -> None:
    def shifting(rows: torch.Tensor) -> torch.Tensor:
        return rows + torch.arange(len(rows))[:, None] * 1e-3

    with pytest.raises(UserError, match=r"the norm depends on a row's place among 16 rows; use another"):
        settle(shifting, (torch.ones(16, 4),), WAYS, "the norm")
    assert settle(double, (torch.ones(16, 4),), WAYS, "it") == WAYS[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(48, 32), (96, 101), (512, 1408)])
def test_trial_products_are_zero_except_for_rounding(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, rows = trial_product(16, *shape, dtype)
    assert (weight.shape, rows.shape) == (shape, (16, shape[1]))
    assert weight.dtype is rows.dtype is dtype
    assert float((rows.double() @ weight.double().T).abs().max()) < 1e-9
    found = F.linear(rows.float(), weight.float())
    assert torch.count_nonzero(found) > 0.2 * found.numel()


@pytest.mark.parametrize("shape", [(48, 32), (512, 1408), (199, 64)])
def test_settled_product_is_batch_invariant(shape: tuple[int, int]) -> None:
    weight, rows = trial_product(16, *shape, torch.bfloat16)

    def product(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight)

    way = settle(product, (rows,), WAYS, "it")
    generator = torch.Generator().manual_seed(0)
    for count in range(1, 41, 3):
        batch = torch.randn((count, shape[1]), generator=generator).bfloat16()
        place = (count * 2) // 3
        alone = way.run(product, batch[place : place + 1].clone())
        with threads(1 + count % 2):
            assert torch.equal(way.run(product, batch)[place], alone[0])


@pytest.mark.parametrize("shape", [(48, 32), (96, 102), (512, 1408), (1030, 64)])
def test_compiled_products_need_no_blocks(native: NativeLibrary, shape: tuple[int, int]) -> None:
    """Any number of rows, any place and any threads: the first way, which is none, holds."""
    if not has_bf16_products(native):
        pytest.skip("this processor has neither AVX-512 BF16 nor AVX2: its bf16 products are torch's")
    weight, rows = trial_product(40, *shape, torch.bfloat16)
    unpadded = [BlockForm(40, padded=False)]
    settle(NativeMatrix(native, weight), (rows,), unpadded, "it")
    if native_multiplies_int8(native):
        settle(NativeInt8Matrix(native, quantise(weight)), (rows,), unpadded, "it")


def test_blocks_on_gpus_are_padded() -> None:
    assert product_ways("cuda") == [BlockForm(64)]
    assert operation_way("cuda") == BlockForm(64)
    assert operation_way("cpu").single
