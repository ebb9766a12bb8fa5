"""Weight reads a second: every kernel that this machine has, one line each, bytes over time."""

import pytest
import torch

from lab.packed.experiment import PackedPlan, kernels_of, measure, table
from ssd_serve.kernels.native.library import NativeLibrary


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_all_kernels_of_a_dtype_compute_the_same(dtype: str, native: NativeLibrary) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((64, 96), generator=generator)
    x = torch.randn((3, 96), generator=generator).to(torch.float32 if dtype == "fp32" else torch.bfloat16)
    layers = {name: make(weight) for name, make in kernels_of(dtype, native).items()}
    exact = x.double() @ weight.double().T
    for name, layer in layers.items():
        assert (layer(x).double() - exact).norm() < 0.02 * exact.norm(), name
    assert len({type(layer) for layer in layers.values()}) == len(layers)


def test_without_compiled_kernels_the_others_are_measured(native: NativeLibrary) -> None:
    for dtype in ("fp32", "bf16", "int8"):
        assert set(kernels_of(dtype, None)) == set(kernels_of(dtype, native)) - {"compiled"}
    assert "torch" in kernels_of("bf16", None)


def test_every_kernel_has_a_line_for_each_number_of_rows(native: NativeLibrary) -> None:
    plan = PackedPlan(
        dtypes=("bf16",), threads=(1,), rows=(1, 3), matrices=2, outputs=64, inputs=96, repeats=2
    )
    result = measure(plan, native)
    found = result["results"]
    assert isinstance(found, list)
    names = list(kernels_of("bf16", native))
    assert [(row["rows"], row["kernel"]) for row in found] == [(n, name) for n in (1, 3) for name in names]
    for row in found:
        assert row["best_ms"] <= row["ms"]
        # 2 matrices of 64 x 96 numbers of 2 bytes; milliseconds and GB/s are rounded.
        assert row["gb_per_s"] == pytest.approx(2 * 64 * 96 * 2 / row["ms"] / 1e6, abs=0.02, rel=0.1)
    assert len(table(result).splitlines()) == 2 + len(found)
