"""Compiled norms, rotations and gates against torch's, and their independence of other rows."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ssd_serve.base.logs import Logger
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.rows import NativeRows, RmsNorm, RowOperations, TorchRows, can_operate

DTYPES = [torch.float32, torch.bfloat16]


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [7, 16, 40, 1024])
@pytest.mark.parametrize("added", [False, True])
def test_norm(native: NativeLibrary, dtype: torch.dtype, size: int, added: bool) -> None:
    norm = RmsNorm(some(torch.float32, size), 1e-5)
    hidden, more = some(dtype, 5, size), some(dtype, 5, size + 1)[:, :size].contiguous() if added else None
    ours, theirs = hidden.clone(), hidden.clone()
    found = NativeRows(native, dtype).norm(ours, more, norm)
    close(found, TorchRows(torch.float32).norm(theirs, more, norm), dtype)
    assert torch.equal(ours, theirs), "the sum stays in `hidden`, rounded as torch rounds it"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 16, 88])
def test_gate(native: NativeLibrary, dtype: torch.dtype, width: int) -> None:
    x = 8 * some(dtype, 4, 2 * width)
    close(NativeRows(native, dtype).gate(x), TorchRows(torch.float32).gate(x.float()), dtype)


def test_gates_far_from_zero(native: NativeLibrary) -> None:
    x = torch.tensor([[-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4, float("nan")] * 2] * 2).repeat(1, 4)
    found = NativeRows(native, torch.float32).gate(x)
    torch.testing.assert_close(found, TorchRows(torch.float32).gate(x), equal_nan=True, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_rotate(native: NativeLibrary, dtype: torch.dtype, normed: bool) -> None:
    heads, turns = some(dtype, 5, 6, 16), torch.view_as_complex(some(torch.float32, 5, 1, 8, 2))
    norm = RmsNorm(some(torch.float32, 4, 16), 1e-6) if normed else None
    found = NativeRows(native, dtype).rotate(heads.clone(), turns, 4, norm)
    assert found.dtype == torch.float32
    close(found, TorchRows(torch.float32).rotate(heads.clone(), turns, 4, norm), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_batch_invariant(native: NativeLibrary, dtype: torch.dtype) -> None:
    operations: RowOperations = NativeRows(native, dtype)
    rows = some(dtype, 6, 2 * 72)
    norm = RmsNorm(torch.ones(144), 1e-5)
    for operation in (operations.gate, lambda x: operations.norm(x.clone(), None, norm)):
        together = operation(rows)
        for row in range(len(rows)):
            assert torch.equal(operation(rows[row : row + 1]), together[row : row + 1])


def test_native_rows_serve_float32_and_bf16_only(native: NativeLibrary) -> None:
    assert [can_operate(native, dtype) for dtype in (*DTYPES, torch.float16)] == [True, True, False]


def test_a_kernel_that_fails_its_self_test_is_logged_once(native: NativeLibrary) -> None:
    class Idle(NativeLibrary):
        def function(self, name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
            return (lambda *_: None) if name.startswith("ssd_gate") else super().function(name, *arguments)

    lines = io.StringIO()
    idle = Idle(native.path, Logger("test", stream=lines))
    assert not any(can_operate(idle, torch.float32) for _ in range(2))
    assert lines.getvalue().count("compiled kernels fail their self-test") == 1
    assert "gates in float" in lines.getvalue()
