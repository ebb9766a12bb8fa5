"""Packages that setup_rocm.sh installs or leaves alone. On simulated machines: no test runs on ROCm."""

import re
import subprocess

import pytest

from tests.setup_rocm.machine import HIP, ROOT, TORCH, Machine
from tests.setup_rocm.pretended_pip import write_module, write_package, write_torch

pytestmark = pytest.mark.slow


def versions(machine: Machine) -> dict[str, str]:
    names = [
        info.name.removesuffix(".dist-info").rpartition("-") for info in machine.site.glob("*.dist-info")
    ]
    return {name.replace("_", "-"): version for name, _, version in names}


def test_package_flashinfer_and_requirements_are_installed(machine: Machine) -> None:
    outcome = machine.run()
    assert outcome.code == 0, outcome
    installed = versions(machine)
    assert installed["amd-flashinfer"] == "0.5.3+amd.2"
    assert {"ssd-serve", "fastapi", "tokenizers", "ninja", "jinja2"} <= set(installed)
    package, flashinfer, needed = machine.calls()
    assert package.arguments == ["install", "--no-deps", "-e", str(ROOT)]
    assert {"--no-deps", "--index-url"} <= set(flashinfer.arguments)
    assert not any(word.startswith(("torch", "triton")) for word in needed.arguments)
    lines = (ROOT / "constraints-rocm.txt").read_text(encoding="utf-8").splitlines()
    assert f"fastapi=={installed['fastapi']}" in {line.partition(" ")[0] for line in lines}


def test_every_pip_call_pins_torch(machine: Machine) -> None:
    """This pip replaces torch unless the installed version is pinned."""
    machine.mood["torch"] = "wants"
    before = machine.torch()
    assert machine.run().code == 0
    assert machine.torch() == before
    calls = machine.calls()
    assert len(calls) == 3
    for call in calls:
        assert [line for line in call.constraints if line.startswith("torch==")] == [f"torch=={TORCH}"]
        assert {"numpy==2.1.3", "triton==3.5.1+rocm7.2.0"} <= set(call.constraints)


def test_replaced_torch_is_an_error(machine: Machine) -> None:
    machine.mood["torch"] = "replaces"
    outcome = machine.run()
    assert outcome.code == 17
    assert f"torch was {TORCH}, HIP {HIP}" in outcome.complained
    assert "is now 2.13.0, HIP none" in outcome.complained


def test_constraints_of_the_user_are_kept(machine: Machine) -> None:
    own = machine.place / "image.txt"
    own.write_text("protobuf==5.0\n", encoding="utf-8")
    machine.variables["PIP_CONSTRAINT"] = str(own)
    assert machine.run().code == 0
    assert all("protobuf==5.0" in call.constraints for call in machine.calls())


def test_second_run_changes_nothing(machine: Machine) -> None:
    assert machine.run().code == 0
    before = machine.files()
    assert str(machine.place / "pip.jsonl") in before
    outcome = machine.run()
    assert outcome.code == 0
    assert machine.files() == before
    assert not re.search("^(install|write)", outcome.said, re.MULTILINE)


@pytest.mark.parametrize(
    ("present", "kept"), [("0.5.3+amd.1", "0.5.3+amd.2"), ("0.6.18+amd.2", "0.6.18+amd.2")]
)
def test_only_old_flashinfer_is_upgraded(machine: Machine, present: str, kept: str) -> None:
    write_package(machine.site, "amd-flashinfer", present)
    write_package(machine.site, "amd-flashinfer-jit-cache", "0.5.3+amd.1")  # kernels of another version
    write_module(machine.site, "flashinfer", "")
    outcome = machine.run()
    assert outcome.code == 0
    assert (f"FlashInfer {present} is wrong" in outcome.said) is (present != kept)
    assert versions(machine)["amd-flashinfer"] == kept
    assert "amd-flashinfer-jit-cache" not in versions(machine)


@pytest.mark.parametrize(
    ("spec", "asked", "got"),
    [
        ("amd-flashinfer==0.6.18+amd.2", "amd-flashinfer", "0.6.18+amd.2"),
        ("amd-flashinfer>=0.6.18+amd.2", "!=0.6.18+amd.0,!=0.6.18+amd.1,", "0.6.18+amd.2"),
        ("amd-flashinfer", "!=0.5.3+amd.0,!=0.5.3+amd.1,>=0.5.3", "0.6.18+amd.2"),
        (
            "amd-flashinfer @ git+https://host/it@v0.5.3+amd.2",
            "git+https://host/it@v0.5.3+amd.2",
            "0.5.3+amd.2",
        ),
    ],
)
def test_flashinfer_version_can_be_chosen(machine: Machine, spec: str, asked: str, got: str) -> None:
    """`>=` with a local version is an invalid requirement; the script excludes older versions instead."""
    machine.variables["SSD_FLASHINFER_SPEC"] = spec
    outcome = machine.run()
    assert outcome.code == 0, outcome
    assert versions(machine)["amd-flashinfer"] == got
    call = machine.calls()[1]
    assert asked in call.arguments[-1]
    assert ">=0.5.3+" not in call.arguments[-1]
    assert ("--index-url" in call.arguments) is ("git" not in spec)


@pytest.mark.parametrize("spec", ["amd-flashinfer==0.5.3+amd.1", "flashinfer-python", "amd flashinfer"])
def test_unsuitable_flashinfer_requirement_is_refused(machine: Machine, spec: str) -> None:
    machine.variables["SSD_FLASHINFER_SPEC"] = spec
    outcome = machine.run()
    assert outcome.code == 2
    assert spec in outcome.complained
    assert machine.calls() == []


def test_index_without_a_fixed_flashinfer_is_an_error(machine: Machine) -> None:
    machine.mood["index"]["amd-flashinfer"] = ["0.5.3+amd.1"]
    outcome = machine.run()
    assert outcome.code == 16
    assert "amd-flashinfer" not in versions(machine)


def test_missing_triton_is_installed_as_torch_requires(machine: Machine) -> None:
    machine.remove("triton")
    assert machine.run().code == 0
    call = machine.calls()[-1]
    assert call.arguments[-1] == "triton==3.5.1+rocm7.2.0"
    assert "--no-deps" in call.arguments
    assert "https://repo.radeon.com/rocm/manylinux/rocm-rel-7.2/" in call.arguments


def test_unusable_packages_are_errors_with_advice(machine: Machine) -> None:
    machine.mood["source"] = "raise OSError('libamdhip64.so is missing')"
    outcome = machine.run()
    assert (outcome.code, "libamdhip64.so is missing" in outcome.complained) == (18, True)
    machine.remove("triton")
    write_package(machine.site, "torch", TORCH)  # requires no Triton by name
    outcome = machine.run()
    assert (outcome.code, "SSD_TRITON_SPEC" in outcome.complained) == (18, True)
    write_package(machine.site, "flashinfer-python", "0.7.2")
    outcome = machine.run()
    assert outcome.code == 18
    assert "pip uninstall flashinfer-python amd-flashinfer" in outcome.complained


def test_kernel_folder_names_torch_flashinfer_and_architecture(machine: Machine) -> None:
    machine.variables["SSD_CACHE_DIR"] = "~/a cache"
    assert machine.run().code == 0
    cache = machine.place / "home" / "a cache"

    def folder() -> str:
        script = f'. "{cache}/rocm.env" && printf %s "$FLASHINFER_WORKSPACE_BASE"'
        return subprocess.run(["sh", "-c", script], check=True, capture_output=True, text=True).stdout

    first = folder()
    assert first == f"{cache}/rocm/torch-{TORCH}_flashinfer-0.5.3+amd.2_gfx942"
    assert (cache / "rocm").is_dir()
    machine.show("gfx950")
    assert machine.run().code == 0
    second = folder()
    write_torch(machine.site, "2.12.0+rocm7.2.0", HIP, None)
    assert machine.run().code == 0
    assert [second, folder()] == [
        first.replace("gfx942", "gfx950"),
        second.replace(TORCH, "2.12.0+rocm7.2.0"),
    ]


def test_rocm_env_sets_tuning_variables_unless_the_user_did(machine: Machine) -> None:
    assert machine.run().code == 0
    names = ("HSA_NO_SCRATCH_RECLAIM", "HIP_FORCE_DEV_KERNARG", "NCCL_MIN_NCHANNELS")
    dockerfile = (ROOT / "deploy" / "rocm.Dockerfile").read_text(encoding="utf-8")
    assert all(re.search(rf"\b{name}=\d+ ", dockerfile) for name in names)
    script = f'. "{machine.environment_file}" && env'
    for given, expected in (({}, ["1", "1", "112"]), ({"NCCL_MIN_NCHANNELS": "32"}, ["1", "1", "32"])):
        done = subprocess.run(
            ["sh", "-c", script],
            env={"PATH": "/usr/bin:/bin", **given},
            check=True,
            capture_output=True,
            text=True,
        )
        seen = dict(line.split("=", 1) for line in done.stdout.splitlines())
        assert [seen[name] for name in names] == expected


@pytest.mark.parametrize(("version", "warned"), [("7.2.0", True), ("7.2.1-81", False), ("7.10.0", False)])
def test_old_rocm_runtime_is_a_warning(machine: Machine, version: str, warned: bool) -> None:
    folder = machine.place / "no-rocm" / ".info"
    folder.mkdir(parents=True)
    (folder / "version").write_text(version + "\n", encoding="utf-8")
    outcome = machine.run("--dry-run")
    assert outcome.code == 0
    assert ("serve with SSD_GRAPHS=false" in outcome.said) is warned


def test_untested_combination_is_reported(machine: Machine) -> None:
    assert "instead of" not in re.sub(r"python \S+ instead of 3.12", "", machine.run().said)
    write_torch(machine.site, "2.12.0+rocm7.1.1", "7.1.52802", None)
    assert "rocm 7.1 instead of 7.2, torch 2.12.0 instead of 2.9.1" in machine.run().said
    machine.variables["SSD_ROCM_CONSTRAINTS"] = ""
    assert "instead of" not in machine.run().said


def test_doctor_runs_if_the_command_exists(machine: Machine) -> None:
    assert "no command 'doctor'" in machine.run().said
    machine.give_ssd(doctor=True)
    machine.variables["SSD_FLASHINFER_SPEC"] = "amd-flashinfer"
    outcome = machine.run()
    assert outcome.code == 0
    assert "no command" not in outcome.said
    seen = (machine.place / "doctor").read_text(encoding="utf-8")
    assert "FLASHINFER_WORKSPACE_BASE" in seen
    assert "SSD_" not in seen
    machine.give_ssd(doctor=True, code=1)
    assert machine.run().code == 19


def test_image_mode_needs_no_gpu_and_writes_no_rocm_env(machine: Machine) -> None:
    machine.give_ssd(doctor=True, code=1)
    (machine.place / "kfd").unlink()
    assert machine.run().code == 10
    outcome = machine.run("--image")
    assert outcome.code == 0, outcome
    assert {"amd-flashinfer", "ssd-serve", "ninja"} <= set(versions(machine))
    assert not machine.environment_file.exists()
    assert not (machine.place / "doctor").exists()
