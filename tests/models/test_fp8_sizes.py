"""Sizes of fp8 checkpoints: a byte a number and the scales where matrices stay in fp8, else wide ones."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_serve.kernels import fp8
from ssd_serve.models import load, sizes
from ssd_serve.models.weights import linear, matrices
from tests.models.fp8_checkpoints import FORMS, MARKED_FORMS, Form, change_tensors, is_quantised, write

FN, FNUZ = fp8.FORMATS
DOWN = "model.layers.1.mlp.down_proj"
HEAD = 199 * 64


@pytest.fixture(params=MARKED_FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


def sizes_on(folder: Path, device: str) -> sizes.ModelSizes:
    return sizes.model_sizes(folder, device=device, dtype="bf16")


def multiply(monkeypatch: pytest.MonkeyPatch, native: torch.dtype) -> None:
    """Let every device but the CPU multiply this format."""
    monkeypatch.setattr(matrices, "native_format", lambda device: native)


@pytest.mark.parametrize("native", fp8.FORMATS)
def test_fp8_sizes_equal_a_loaded_model(
    form: Form, native: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    narrow: list[bool] = []

    def record(kind: Any, numbers: torch.Tensor, *more: Any) -> Any:
        scales = more[0] if kind is fp8.Fp8Matrix else None
        held.append(numbers.nbytes + (0 if scales is None else scales.nbytes))
        narrow.append(scales is not None)
        return kind(numbers, *more)

    for module, name in ((matrices, "Fp8Matrix"), (linear, "DenseLinear")):
        kind = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, kind=kind: record(kind, *given))
    monkeypatch.setattr(linear, "can_pack", lambda _dtype: False)
    for module in (matrices,):
        monkeypatch.setattr(module, "multiplied_format", lambda *_: native)
    write(form, tmp_path)
    model = load.load_model(tmp_path, load.ModelOptions(device="cpu", dtype="bf16", slots=16, context=64))
    assert len(held) == 3 * 4 + 1
    assert model.facts.weight_bytes == sum(held) == sizes_on(tmp_path, "cpu").read_bytes
    blocks = form.kind("") == "block"
    assert sum(narrow) == (0 if blocks or (form.form is FNUZ and native is FN) else 3 * 4)


def test_fp8_sizes_count_one_byte_per_number_and_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = FORMS["compressed-tensor-static"]
    weights = write(form, tmp_path).state_dict()
    multiply(monkeypatch, FN)
    matrices = [weight for name, weight in weights.items() if is_quantised(name, form)]
    found = sizes_on(tmp_path, "cuda:0")
    narrow = sum(weight.numel() + 4 * len(weight) for weight in matrices)
    assert found.read_bytes == narrow + 2 * HEAD
    assert found.resident_bytes == narrow + 2 * 2 * HEAD  # the embedding is as large as the head
    wide = sizes_on(tmp_path, "cpu")
    assert wide.read_bytes == 2 * (sum(weight.numel() for weight in matrices) + HEAD)
    assert wide.kv_bytes_per_slot == 2 * found.kv_bytes_per_slot  # float32 and bf16: neither is fp8


def test_a_matrix_that_is_not_quantised_is_wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = write(FORMS["fp8-static"], tmp_path).state_dict()
    multiply(monkeypatch, FN)
    before = sizes_on(tmp_path, "cuda:0").read_bytes
    weight = weights[f"{DOWN}.weight"]

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{DOWN}.weight"] = weight
        del tensors[f"{DOWN}.weight_scale"], tensors[f"{DOWN}.activation_scale"]

    change_tensors(tmp_path, widen)
    assert sizes_on(tmp_path, "cuda:0").read_bytes - before == weight.numel() - 4 * len(weight)


def test_devices_that_do_not_multiply_fp8_hold_wide_weights(
    form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(form, tmp_path)
    monkeypatch.setattr(matrices, "native_format", lambda device: None)
    assert sizes_on(tmp_path, "cuda:0").read_bytes == sizes_on(tmp_path, "cpu").read_bytes


def test_sizes_on_cpus_need_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(FORMS["fp8-static"], tmp_path)
    multiply(monkeypatch, FN)
    wide = sizes_on(tmp_path, "cpu")
    (tmp_path / "model.safetensors").unlink()
    assert sizes_on(tmp_path, "cpu") == wide
