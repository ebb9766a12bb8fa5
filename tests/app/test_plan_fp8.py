"""Tests of `ssd plan` for fp8 checkpoints: bytes that devices with and without fp8 products read."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ssd_serve.app.cli import main as cli
from ssd_serve.app.plan import known_models as plan_models
from ssd_serve.app.plan.device_tables import device_sheet, sheet_names
from ssd_serve.app.plan.devices import Forward, Sheets
from ssd_serve.app.plan.known_models import (
    Computing,
    PlannedModel,
    known_model,
    multiplied_fp8,
    planned_model,
    sized,
)
from ssd_serve.base.devices import Machine
from ssd_serve.kernels.fp8 import FORMATS
from ssd_serve.models.sizes import model_sizes
from ssd_serve.models.weights import matrices
from ssd_serve.models.weights.quantization import Fp8Scheme
from tests.models.fp8_checkpoints import FORMS, write

FN, FNUZ = FORMATS
BF16 = torch.bfloat16


def on_gpu(name: str | Path, fp8: torch.dtype | None) -> PlannedModel:
    return planned_model(str(name), "target", Computing("cuda:0", BF16, fp8), None)


def known_fp8(name: str, fp8: torch.dtype | None, scheme: Fp8Scheme) -> PlannedModel:
    """Return a well-known model with this scheme in its `config.json`."""
    model = known_model(name)
    assert model is not None
    quantised = replace(model, config=replace(model.config, fp8=scheme))
    return sized(name, quantised, Computing("cuda:0", BF16, fp8))


TENSOR = Fp8Scheme(frozenset({"tensor"}), rounds_inputs=True)


def test_fp8_formats_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {name: multiplied_fp8(name) for name in sheet_names()}
    assert found == {"mi300x": FNUZ, "mi325x": FNUZ, "mi350x": FN, "mi355x": FN, "h100": FN, "h200": FN}
    assert multiplied_fp8("cpu") is None
    monkeypatch.setattr(plan_models, "this_machine", lambda: Machine((0,), gpus=0))
    assert multiplied_fp8("cuda") is None
    monkeypatch.setattr(plan_models, "this_machine", lambda: Machine((0,), gpus=1))
    monkeypatch.setattr(plan_models, "native_format", lambda _: FN)
    assert multiplied_fp8("cuda") is FN


@pytest.mark.parametrize("native", [FN, FNUZ, None])
@pytest.mark.parametrize("name", FORMS)
def test_planned_bytes_are_those_of_the_loaded_model(
    name: str, native: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrices, "native_format", lambda _: native)
    write(FORMS[name], tmp_path)
    planned, loaded = on_gpu(tmp_path, native), model_sizes(tmp_path, device="cuda:0", dtype="bf16")
    assert planned.matrix_bytes == loaded.read_bytes
    assert planned.resident_bytes == loaded.resident_bytes
    assert planned.kv_bytes_per_token == loaded.kv_bytes_per_slot
    assert planned.flops_per_row == planned.wide_bytes
    assert planned.fp8 is (planned.matrix_bytes < planned.wide_bytes)


@pytest.mark.parametrize(
    "name", ["compressed-tensor-static", "fp8-static", "quark-channel-dynamic", "fp8-block"]
)
def test_fp8_sizes_follow_from_the_configuration_alone(name: str, tmp_path: Path) -> None:
    write(FORMS[name], tmp_path)
    with_files = on_gpu(tmp_path, FN)
    (tmp_path / "model.safetensors").unlink()
    assert on_gpu(tmp_path, FN) == with_files


def test_fp8_70b_fits_one_h100_and_reads_half() -> None:
    wide, narrow = (known_fp8("llama-3.1-70b", fp8, TENSOR) for fp8 in (None, FN))
    assert (wide.fp8, narrow.fp8) == (False, True)
    assert narrow.matrix_bytes == pytest.approx(0.5 * wide.matrix_bytes, rel=0.02)
    assert narrow.flops_per_row == wide.flops_per_row
    h100 = device_sheet("h100")
    assert narrow.resident_bytes < h100.memory_gb * 1e9 < wide.resident_bytes
    reading = [Sheets(h100, 1).parts(model, 1, Forward(1)).weights_s for model in (narrow, wide)]
    assert reading[0] / reading[1] == pytest.approx(narrow.matrix_bytes / wide.matrix_bytes)
    # A long prompt is compute-bound, and the table has no fp8 rate.
    prompt = [Sheets(h100, 1).step_s(model, 1, Forward(2048, 2048)) for model in (narrow, wide)]
    assert prompt[0] == pytest.approx(prompt[1])


@pytest.mark.parametrize(
    "scheme", [replace(TENSOR, rounds_inputs=False), Fp8Scheme(frozenset({"block"}), (1, 1), True)]
)
def test_fp8_weights_without_fp8_products_are_widened(scheme: Fp8Scheme) -> None:
    found = known_fp8("llama-3.1-8b", FN, scheme)
    assert found.matrix_bytes == found.wide_bytes
    assert found.fp8 is False


@pytest.mark.parametrize("name", ["compressed-tensor-static", "compressed-block"])
def test_plan_notes_widened_fp8_weights(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(FORMS[name], tmp_path / "model")
    assert cli.main(["plan", str(tmp_path / "model"), "--device", "mi300x", "--context", "64"]) == 0
    assert ("fp8 weights are widened on this device: model" in capsys.readouterr().out) == ("block" in name)
