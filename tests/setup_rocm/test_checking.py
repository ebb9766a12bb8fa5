"""Refusals of setup_rocm.sh, and modes that change nothing. On simulated machines only."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.setup_rocm.machine import HIP, ROOT, SCRIPT, TORCH, Machine
from tests.setup_rocm.pretended_pip import write_module, write_package, write_torch


def test_missing_driver(machine: Machine) -> None:
    (machine.place / "kfd").unlink()
    outcome = machine.run()
    assert outcome.code == 10
    assert "--device=/dev/kfd" in outcome.complained


@pytest.mark.skipif(os.geteuid() == 0, reason="root may use every file")
def test_driver_without_permission(machine: Machine) -> None:
    (machine.place / "kfd").chmod(0)
    outcome = machine.run()
    assert outcome.code == 10
    assert "join its group" in outcome.complained


def test_missing_gpu(machine: Machine) -> None:
    machine.show()
    assert machine.run().code == 10
    machine.command("rocminfo", "exit 1\n")
    assert machine.run().code == 10
    (machine.place / "bin" / "rocminfo").unlink()
    assert machine.run().code == 10
    assert machine.calls() == []


def test_amd_smi_is_used_without_rocminfo(machine: Machine) -> None:
    (machine.place / "bin" / "rocminfo").unlink()
    machine.command("amd-smi", 'echo "        TARGET_GRAPHICS_VERSION: gfx950"\n')
    outcome = machine.run("--dry-run")
    assert outcome.code == 0
    assert "GPU: gfx950" in outcome.said


def test_wrong_architecture(machine: Machine) -> None:
    machine.show("gfx90a", "gfx1100")
    outcome = machine.run()
    assert outcome.code == 11
    assert "gfx1100 gfx90a" in outcome.complained
    assert machine.calls() == []


def test_other_gpus_beside_a_supported_one_are_ignored(machine: Machine) -> None:
    machine.show("gfx1036", "gfx942", "gfx942")
    assert "GPU: gfx942\n" in machine.run("--dry-run").said


@pytest.mark.parametrize(
    ("version", "cuda", "named"), [("2.13.0+cu130", "13.0", "CUDA 13.0"), ("2.13.0+cpu", None, "CPUs")]
)
def test_torch_that_is_not_for_rocm(machine: Machine, version: str, cuda: str | None, named: str) -> None:
    write_torch(machine.site, version, None, cuda)
    before = machine.torch()
    outcome = machine.run()
    assert outcome.code == 13
    assert f"torch {version} is for {named}, not for ROCm" in outcome.complained
    assert machine.torch() == before
    assert machine.calls() == []


def test_missing_or_broken_torch(machine: Machine) -> None:
    write_module(machine.site, "torch", "raise OSError('libamdhip64.so: cannot open shared object file')")
    outcome = machine.run()
    assert outcome.code == 13
    assert "libamdhip64.so: cannot open" in outcome.complained
    machine.remove("torch")
    outcome = machine.run()
    assert outcome.code == 13
    assert "pip install torch==2.9.1 -f https://repo.radeon.com" in outcome.complained
    assert machine.calls() == []


def test_torch_without_metadata(machine: Machine) -> None:
    shutil.rmtree(next(machine.site.glob("torch-*")))
    assert machine.run().code == 13


def test_no_network(machine: Machine) -> None:
    machine.mood["offline"] = True
    outcome = machine.run()
    assert outcome.code == 15
    assert "HTTPS_PROXY" in outcome.complained
    assert len(machine.calls()) == 1


def test_missing_python(machine: Machine) -> None:
    machine.variables["PYTHON"] = "no/python"
    assert machine.run().code == 12


def test_externally_managed_python_is_refused(machine: Machine) -> None:
    (machine.place / "EXTERNALLY-MANAGED").touch()
    write_module(machine.site, "sysconfig", f"def get_path(name): return {str(machine.place)!r}")
    machine.variables["PIP_BREAK_SYSTEM_PACKAGES"] = "0"
    outcome = machine.run()
    assert outcome.code == 12
    assert "venv --system-site-packages" in outcome.complained
    assert machine.calls() == []


def test_dry_run_prints_commands_and_changes_nothing(machine: Machine) -> None:
    write_package(machine.site, "amd-flashinfer", "0.5.3+amd.1")
    machine.remove("triton")
    before = machine.files()
    outcome = machine.run("--dry-run")
    assert outcome.code == 0
    assert machine.files() == before
    for step in ("pip install --no-deps -e", "amd-flashinfer", "fastapi", "triton==3.5.1", "rocm.env"):
        assert re.search(f"^would .*{re.escape(step)}", outcome.said, re.MULTILINE), step
    assert "0.5.3+amd.1 is wrong" in outcome.said


def test_check_lists_all_problems_and_changes_nothing(machine: Machine) -> None:
    machine.show("gfx90a")
    write_package(machine.site, "amd-flashinfer", "0.5.3+amd.1")
    before = machine.files()
    outcome = machine.run("--check")
    assert outcome.code == 11
    assert machine.files() == before
    assert "0.5.3+amd.1 is wrong" in outcome.said
    for missing in ("gfx90a", "install ssd-serve", "install amd-flashinfer>=0.5.3+amd.2", "what they need"):
        assert missing in outcome.complained


def test_check_mode_reports_the_installation(machine: Machine) -> None:
    assert machine.run("--check").code == 14
    assert machine.run().code == 0
    outcome = machine.run("--check")
    assert (outcome.code, outcome.complained) == (0, "")
    assert "all is in place" in outcome.said
    write_torch(machine.site, TORCH, None, "13.0")
    assert machine.run("--check").code == 13
    write_torch(machine.site, "2.10.0", HIP, None)
    assert machine.run("--check").code == 14, "compiled kernels of another torch"


@pytest.mark.parametrize("options", [["--fast"], ["--dry-run", "now"], ["--check", "--chekc"]])
def test_unknown_option(machine: Machine, options: list[str]) -> None:
    outcome = machine.run(*options)
    assert outcome.code == 2
    assert options[-1] in outcome.complained
    assert machine.calls() == []


def test_missing_constraints_file(machine: Machine) -> None:
    machine.variables["SSD_ROCM_CONSTRAINTS"] = "none.txt"
    assert machine.run().code == 2


def test_help_names_every_code_and_variable(machine: Machine) -> None:
    outcome = machine.run("--help")
    assert outcome.code == 0
    source = SCRIPT.read_text(encoding="utf-8")
    codes = {"0", "1", *re.findall(r"problem (\d+) ", source)}
    assert set(re.findall(r"^ +(\d+)  ", outcome.said, re.MULTILINE)) == codes
    variables = set(re.findall(r"\$\{(SSD_\w+)", source))
    assert variables == set(re.findall(r"^  (SSD_\w+)", outcome.said, re.MULTILINE))
    assert "not on a ROCm machine" in outcome.said


def pins(name: str) -> dict[str, str]:
    """Requirements of a constraints file by name, as they are written."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return {Requirement(line).name.lower(): line for line in lines if line and not line.startswith("#")}


def test_rocm_constraints_are_exact_and_agree_with_the_others() -> None:
    rocm, usual = pins("constraints-rocm.txt"), pins("constraints.txt")
    assert all(re.match(r"[\w.-]+==[^*\s]+( ;|$)", line) for line in rocm.values())
    own = {"torch", "amd-flashinfer", "ninja"}
    assert {name: usual.get(name) for name in rocm if name not in own} == {
        name: line for name, line in rocm.items() if name not in own
    }
    text = (ROOT / "constraints-rocm.txt").read_text(encoding="utf-8")
    named = dict(re.findall(r"^# (image|python|rocm): (\S+)$", text, re.MULTILINE))
    release = rf"rocm{named['rocm']}\.\d+_ubuntu24.04_py{named['python']}_pytorch_release_{rocm['torch'][7:]}"
    assert re.fullmatch(f"rocm/pytorch:{release}", named["image"])
    assert f"{rocm['torch']} -f $WHEELS/rocm-rel-{named['rocm']}/" in SCRIPT.read_text(encoding="utf-8")


def test_rocm_constraints_cover_the_dependencies() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = project.partition("\ndependencies = [\n")[2].partition("]\n")[0]
    needed = {Requirement(text).name for text in re.findall(r'"(.+)"', listed)}
    assert len(needed) > 10
    names = {name.replace("_", "-") for name in pins("constraints-rocm.txt")}
    assert needed - names == {"numpy"}


def test_shellcheck_finds_nothing() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck, "it comes with the extra dev: pip install -e '.[dev]'"
    done = subprocess.run([shellcheck, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
