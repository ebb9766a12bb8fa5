"""`ssd plan` and serving share one table: what served rounds took is what the plan says."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ssd_serve.app.cli import main
from ssd_serve.app.plan.known_models import Computing, planned_model
from ssd_serve.base.cost import Reading
from ssd_serve.base.devices import Device, this_machine
from ssd_serve.base.logs import get_logger
from ssd_serve.base.settings import Settings
from ssd_serve.models import hub, roof
from ssd_serve.models.load import load_served
from ssd_serve.models.roof import Roof, cpu_roofs
from ssd_serve.verifier.control.timing import StepTimes, TimingFiles
from tests.end_to_end.tiny_pair import write_pair

CORES = this_machine().cores


def planned(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    assert main.main(["plan", *arguments, "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    found: dict[str, float] = plan["layouts"][0]
    return found


def test_plan_of_a_served_model_is_what_its_rounds_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan measures once and reads what the served model's rounds took."""
    target, _ = write_pair(tmp_path)
    cache = tmp_path / "cache"
    monkeypatch.setenv("SSD_CACHE_DIR", str(cache))
    monkeypatch.setenv("SSD_NATIVE_KERNELS", "false")
    measured: list[int] = []

    def measure(_device: str, dtype: str, cores: tuple[int, ...], *_: object) -> Roof:
        measured.append(len(cores))
        return Roof(len(cores), dtype, {1: 1e-10, 64: 1e-9}, 1e10)

    monkeypatch.setattr(roof, "measure_roof", measure)
    arguments = [str(target), "--device", "cpu", "--context", "64"]
    before = planned(arguments, capsys)
    assert planned(arguments, capsys) == before
    assert measured == sorted({1, max(1, len(CORES) - 1), len(CORES)})

    settings = Settings(target=str(target), cache_dir=cache, native_kernels=False)
    model = load_served(settings.engine_config(), target, "cpu", 256, None)
    times = StepTimes(model, TimingFiles(cache, get_logger("test")), cache)
    table = times.table(Device("cpu", CORES))
    for _ in range(20):
        table.observe(1, 0.25, Reading(64, 64))
    times.store()
    assert planned(arguments, capsys)["target_step_s"] == pytest.approx(0.25, rel=0.05)


def test_plan_of_a_cached_hub_model_is_that_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing, real bytes and the times of earlier sessions are known for it, too, without a network."""
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789abcdef0123456789abcdef01234567"
    place = tmp_path / "models--owner--name"
    target, _ = write_pair(tmp_path)
    shutil.copytree(target, place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    computing = Computing("cpu", torch.bfloat16)
    named = planned_model("owner/name", "target", computing, None)
    assert named == replace(planned_model(str(target), "target", computing, None), name="owner/name")
    assert named.served_dtype


def test_roofs_are_stored_by_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        roof, "measure_roof", lambda _d, dtype, cores, *_: Roof(len(cores), dtype, {1: 1e-9}, 1.0)
    )
    found = cpu_roofs((0, 1, 2), "float32", tmp_path)
    assert [each.cores for each in found] == [1, 2, 3]
    monkeypatch.setattr(roof, "measure_roof", None)
    assert cpu_roofs((4, 5, 6), "float32", tmp_path) == found
