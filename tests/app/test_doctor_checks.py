"""Checks of drivers, GPUs and packages by `ssd doctor`."""

import importlib.metadata
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ssd_serve.app.doctor import checks as doctor_checks
from ssd_serve.app.doctor.checks import Check, State, examine
from ssd_serve.base.settings import Settings
from ssd_serve.cluster.ray.cluster import RayView
from ssd_serve.models.roof import Roof

CPU = Settings()
GPU = (Settings(target_device="cuda:0"), Settings(target_device="cpu", draft_device="cuda:0"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray and the measurement of the cores are replaced because they take seconds."""
    monkeypatch.setattr(doctor_checks, "ray_view", lambda: RayView(4, 0))
    monkeypatch.setattr(doctor_checks, "cpu_roofs", lambda *_: [Roof(2, "packed", {1: 1e-10}, 2e12)])


def found(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


@dataclass(frozen=True, slots=True)
class Files:
    kfd: Path
    amd_driver: Path
    nvidia_control: Path
    nvidia_driver: Path


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Files:
    """Return driver files that a test may create; torch finds no usable GPU."""
    found = Files(*(tmp_path / name for name in ("kfd", "amdgpu", "nvidiactl", "nvidia")))
    for name in ("kfd", "amd_driver", "nvidia_control", "nvidia_driver"):
        monkeypatch.setattr(doctor_checks, f"_{name.upper()}", getattr(found, name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", None)
    return found


def test_unusable_amd_gpu_is_a_problem_if_it_is_configured(files: Files) -> None:
    files.kfd.touch()
    for settings, state in ((CPU, State.NOTE), *((each, State.PROBLEM) for each in GPU)):
        checks = [*doctor_checks.devices(settings), *doctor_checks.torch_build(settings)]
        for name in ("GPUs", "torch"):
            assert found(checks, name).state is state
            assert "setup_rocm.sh" in found(checks, name).advice


@pytest.mark.slow
def test_machine_with_an_apu_has_no_problem(files: Files) -> None:
    files.kfd.touch()
    assert State.PROBLEM not in {check.state for check in examine(CPU, lambda text: None)}


@pytest.mark.parametrize("which", ["nvidia_control", "nvidia_driver"])
def test_unusable_nvidia_gpu_is_reported(files: Files, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(getattr(files, which)).touch()
    assert found([*doctor_checks.devices(CPU)], "GPUs").state is State.NOTE
    problem = found([*doctor_checks.devices(GPU[0])], "GPUs")
    assert problem.state is State.PROBLEM
    assert "NVIDIA" in problem.found
    assert "torch for CUDA" in problem.advice
    files.kfd.touch()  # an AMD GPU in the processor
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "too old for CUDA 12.8" in found([*doctor_checks.devices(CPU)], "GPUs").advice
    assert found([*doctor_checks.torch_build(GPU[0])], "torch").state is State.OK


def test_configured_gpu_that_is_absent_is_a_problem(files: Files) -> None:
    assert found([*doctor_checks.devices(CPU)], "GPUs").state is State.OK
    for settings in GPU:
        assert found([*doctor_checks.devices(settings)], "GPUs").state is State.PROBLEM


def test_gpu_without_permission_is_a_problem_if_it_is_configured(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.kfd.touch()
    assert [*doctor_checks.access(CPU)] == []
    monkeypatch.setattr(os, "access", lambda path, mode: path != files.kfd)
    assert found([*doctor_checks.access(CPU)], "GPU access").state is State.NOTE
    assert found([*doctor_checks.access(GPU[0])], "GPU access").state is State.PROBLEM


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return package versions by name, for a test to fill; others count as not installed."""
    versions: dict[str, str] = {}

    def version(package: str) -> str:
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return versions


@pytest.mark.parametrize(
    ("hip", "fitting", "other", "advice"),
    [
        (None, "flashinfer-python", "amd-flashinfer", "pip install 'ssd-serve[flashinfer]'"),
        ("7.2.0", "amd-flashinfer", "flashinfer-python", "./setup_rocm.sh"),
    ],
)
def test_missing_flashinfer_advice_names_the_package(
    installed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    hip: str | None,
    fitting: str,
    other: str,
    advice: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", hip)
    checks = [*doctor_checks.packages()]
    assert found(checks, fitting).state is State.NOTE
    assert advice in found(checks, fitting).advice
    assert found(checks, other) == Check(other, State.OK, "not installed")
    installed[fitting] = "0.7.3"
    assert found([*doctor_checks.packages()], fitting) == Check(fitting, State.OK, "0.7.3")


def test_cpu_lacks_no_package(installed: dict[str, str], files: Files) -> None:
    assert {check.state for check in doctor_checks.packages()} == {State.OK}
    assert found([*doctor_checks.packages()], "ray").found == "not installed (only SSD_LAUNCHER=ray needs it)"


@pytest.mark.parametrize(
    ("seen", "gpus", "state", "words"),
    [
        (RayView(4, 0), 0, State.OK, "sees 4 cores and 0 GPUs"),
        (RayView(192, 8, ("AMD-Instinct-MI300X-OAM",)), 8, State.OK, "8 GPUs (AMD-Instinct-MI300X-OAM)"),
        (RayView(192, 6), 8, State.NOTE, "6 GPUs"),
        (RayView(failure="no answer within 60 s"), 0, State.NOTE, "does not start: no answer within 60 s"),
    ],
)
def test_ray_resources_are_reported(
    installed: dict[str, str],
    files: Files,
    monkeypatch: pytest.MonkeyPatch,
    seen: RayView,
    gpus: int,
    state: State,
    words: str,
) -> None:
    installed["ray"] = "2.60.0"
    monkeypatch.setattr(doctor_checks, "ray_view", lambda: seen)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    told = found([*doctor_checks.packages()], "ray")
    assert told.state is state
    assert told.found.startswith("2.60.0")
    assert words in told.found
    assert bool(told.advice) == (state is State.NOTE)


def test_collectives_are_tested_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, bool]] = []
    wrong = ["", "", "no answer within 90 s", "", "it ended with code -6"]

    def failure(devices: Sequence[str], *, captured: bool = False) -> str:
        assert devices[0] == "cuda:0"
        tried.append((len(devices), captured))
        return wrong.pop(0)

    assert [*doctor_checks.collectives()] == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert found([*doctor_checks.collectives()], "NCCL").state is State.NOTE
    assert not tried
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 3))
    monkeypatch.setattr(doctor_checks, "failure", failure)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    right = Check("NCCL", State.OK, "2.27.3, sums on cuda:0, also captured")
    assert found([*doctor_checks.collectives()], "NCCL") == right
    monkeypatch.setattr(torch.version, "hip", "7.2.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 9)
    failed = found([*doctor_checks.collectives()], "RCCL")
    assert failed.state is State.NOTE
    assert "no answer" in failed.found
    uncaptured = found([*doctor_checks.collectives()], "RCCL")
    assert "sums on cuda:0 to cuda:7, but not when captured: it ended with code -6" in uncaptured.found
    assert "SSD_GRAPHS=false" in uncaptured.advice
    assert tried == [(1, False), (1, True), (8, False), (8, False), (8, True)]


def test_driver_version_may_be_missing(files: Files) -> None:
    files.nvidia_driver.touch()
    assert found([*doctor_checks.driver()], "driver").found == "NVIDIA, of no version"
    files.nvidia_driver.write_text("NVRM version: 580.1\nGCC version: 12\n")
    assert found([*doctor_checks.driver()], "driver").found == "NVRM version: 580.1"


@pytest.mark.slow
def test_unreadable_driver_is_a_note(files: Files) -> None:
    files.nvidia_driver.mkdir()  # as unreadable as a file can be for root
    checks = examine(CPU, lambda text: None)
    note = found(checks, "driver")
    assert note.state is State.NOTE
    assert "IsADirectoryError" in note.found
    assert note.advice
    assert found(checks, "would serve").state is State.OK
