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


def test_the_right_machine_gets_the_package_flashinfer_and_what_they_need(machine: Machine) -> None:
    outcome = machine.run()
    assert outcome.code == 0, outcome
    installed = versions(machine)
    assert installed["amd-flashinfer"] == "0.5.3+amd.2"
    assert {"ssd-serve", "fastapi", "tokenizers", "ninja", "jinja2"} <= set(installed)
    package, flashinfer, needed = machine.calls()
    assert package.arguments == ["install", "--no-deps", "-e", str(ROOT)]
    assert {"--no-deps", "--index-url"} <= set(flashinfer.arguments)
    assert not any(word.startswith(("torch", "triton")) for word in needed.arguments)


def test_exact_versions_come_from_the_constraints_file(machine: Machine) -> None:
    machine.run()
    lines = (ROOT / "constraints-rocm.txt").read_text(encoding="utf-8").splitlines()
    assert f"fastapi=={versions(machine)['fastapi']}" in {line.partition(" ")[0] for line in lines}


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


def test_a_pip_that_would_take_another_torch_does_so_when_nothing_holds_it(machine: Machine) -> None:
    """This pip replaces torch without a pin, so the test above can fail."""
    machine.mood["torch"] = "wants"
    machine.run("--check")
    before = machine.torch()
    place = machine.place / "bin" / "python3"
    subprocess.run([place, "-m", "pip", "install", "rich"], check=True, env={"PATH": "/usr/bin:/bin"})
    assert machine.torch() != before


def test_a_torch_that_changed_all_the_same_is_an_error(machine: Machine) -> None:
    machine.mood["torch"] = "replaces"
    outcome = machine.run()
    assert outcome.code == 17
    assert f"torch was {TORCH}, HIP {HIP}" in outcome.complained
    assert "is now 2.13.0, HIP none" in outcome.complained


def test_constraints_of_the_image_are_kept(machine: Machine) -> None:
    own = machine.place / "image.txt"
    own.write_text("protobuf==5.0\n", encoding="utf-8")
    machine.variables["PIP_CONSTRAINT"] = str(own)
    assert machine.run().code == 0
    assert all("protobuf==5.0" in call.constraints for call in machine.calls())


def test_a_second_run_installs_and_changes_nothing(machine: Machine) -> None:
    assert machine.run().code == 0
    before = machine.files()
    assert str(machine.place / "pip.jsonl") in before
    outcome = machine.run()
    assert outcome.code == 0
    assert machine.files() == before
    assert not re.search("^(install|write)", outcome.said, re.MULTILINE)


def test_an_old_flashinfer_is_named_as_wrong_and_upgraded(machine: Machine) -> None:
    write_package(machine.site, "amd-flashinfer", "0.5.3+amd.1")
    outcome = machine.run()
    assert outcome.code == 0
    assert "FlashInfer 0.5.3+amd.1 is wrong" in outcome.said
    assert versions(machine)["amd-flashinfer"] == "0.5.3+amd.2"


def test_a_newer_flashinfer_is_left_alone(machine: Machine) -> None:
    write_package(machine.site, "amd-flashinfer", "0.6.18+amd.2")
    write_module(machine.site, "flashinfer", "")
    assert machine.run().code == 0
    assert versions(machine)["amd-flashinfer"] == "0.6.18+amd.2"


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
def test_another_flashinfer_can_be_asked_for(machine: Machine, spec: str, asked: str, got: str) -> None:
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
def test_a_requirement_that_will_not_do_is_refused(machine: Machine, spec: str) -> None:
    machine.variables["SSD_FLASHINFER_SPEC"] = spec
    outcome = machine.run()
    assert outcome.code == 2
    assert spec in outcome.complained
    assert machine.calls() == []


def test_an_index_without_the_fixed_flashinfer_is_no_success(machine: Machine) -> None:
    machine.mood["index"]["amd-flashinfer"] = ["0.5.3+amd.1"]
    outcome = machine.run()
    assert outcome.code == 16
    assert "amd-flashinfer" not in versions(machine)


def test_kernels_prebuilt_for_another_flashinfer_are_removed(machine: Machine) -> None:
    write_package(machine.site, "amd-flashinfer-jit-cache", "0.5.3+amd.1")
    assert machine.run().code == 0
    assert "amd-flashinfer-jit-cache" not in versions(machine)


def test_flashinfer_for_cuda_is_in_the_way(machine: Machine) -> None:
    write_package(machine.site, "flashinfer-python", "0.7.2")
    outcome = machine.run()
    assert outcome.code == 18
    assert "pip uninstall flashinfer-python amd-flashinfer" in outcome.complained


def test_triton_is_installed_only_where_it_is_missing_and_as_torch_wants_it(machine: Machine) -> None:
    machine.remove("triton")
    assert machine.run().code == 0
    call = machine.calls()[-1]
    assert call.arguments[-1] == "triton==3.5.1+rocm7.2.0"
    assert "--no-deps" in call.arguments
    assert "https://repo.radeon.com/rocm/manylinux/rocm-rel-7.2/" in call.arguments


def test_without_a_name_for_triton_the_user_is_asked(machine: Machine) -> None:
    machine.remove("triton")
    write_package(machine.site, "torch", TORCH)
    outcome = machine.run()
    assert outcome.code == 18
    assert "SSD_TRITON_SPEC" in outcome.complained


def test_a_flashinfer_that_cannot_be_imported_is_an_error(machine: Machine) -> None:
    machine.mood["source"] = "raise OSError('libamdhip64.so is missing')"
    outcome = machine.run()
    assert outcome.code == 18
    assert "libamdhip64.so is missing" in outcome.complained


def test_compiled_kernels_get_a_folder_for_each_torch_flashinfer_and_architecture(machine: Machine) -> None:
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


def test_another_combination_is_pointed_out(machine: Machine) -> None:
    assert "instead of" not in re.sub(r"python \S+ instead of 3.12", "", machine.run().said)
    write_torch(machine.site, "2.12.0+rocm7.1.1", "7.1.52802", None)
    assert "rocm 7.1 instead of 7.2, torch 2.12.0 instead of 2.9.1" in machine.run().said
    machine.variables["SSD_ROCM_CONSTRAINTS"] = ""
    assert "instead of" not in machine.run().said


def test_a_doctor_is_asked_where_there_is_one(machine: Machine) -> None:
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


def test_an_image_is_made_without_a_gpu_and_without_rocm_env(machine: Machine) -> None:
    machine.give_ssd(doctor=True, code=1)
    (machine.place / "kfd").unlink()
    assert machine.run().code == 10
    outcome = machine.run("--image")
    assert outcome.code == 0, outcome
    assert {"amd-flashinfer", "ssd-serve", "ninja"} <= set(versions(machine))
    assert not machine.environment_file.exists()
    assert not (machine.place / "doctor").exists()
