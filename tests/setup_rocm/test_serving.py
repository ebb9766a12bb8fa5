"""`make serve` on machines with GPUs: with what setup_rocm.sh prepared, or with what it installs itself."""

import os
import shutil
import subprocess

import pytest

from tests.setup_rocm.machine import HIP, ROOT, Machine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("make") is None, reason="there is no make"),
]


def make(machine: Machine, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run the real Makefile as on this machine; what it would install goes into the machine's folder."""
    environment = {
        "PATH": f"{machine.place / 'bin'}:/usr/bin:/bin",
        "HOME": str(machine.place / "home"),
        "KFD": str(machine.place / "kfd"),
        "NVIDIA": str(machine.place / "nvidiactl"),
        "LC_ALL": "C",
        **variables,
    }
    return subprocess.run(
        ["make", "--no-print-directory", "-C", str(ROOT), f"VENV={machine.place / 'venv'}", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_make_serve_uses_the_prepared_python_and_torch(machine: Machine) -> None:
    assert machine.run().code == 0
    installed, torch = len(machine.calls()), machine.torch()
    done = make(machine, "serve", "ARGS=--port 9000")
    assert done.returncode == 0, done
    kernels = machine.environment_file.parent / "rocm"
    assert done.stdout.startswith(f"serves with HIP {HIP} kernels in {kernels}/")
    assert done.stdout.endswith(" --port 9000\n")
    assert (len(machine.calls()), machine.torch()) == (installed, torch)
    assert not (machine.place / "venv").exists()


def test_last_line_is_the_command_that_serves(machine: Machine) -> None:
    command = machine.run().said.splitlines()[-1].strip()
    assert command == f"make -C {ROOT} serve"
    done = make(machine, *command.split()[3:])
    assert done.stdout.startswith(f"serves with HIP {HIP}")


def test_named_python_replaces_the_prepared_one(machine: Machine) -> None:
    shutil.move(machine.place / "bin" / "python3", machine.place / "bin" / "python-of-rocm")
    machine.variables["PYTHON"] = "python-of-rocm"
    assert machine.run().code == 0
    machine.command("python3", "echo 'the wrong one'; exit 1")
    assert make(machine, "serve").stdout.startswith(f"serves with HIP {HIP}")
    for named in (make(machine, "serve", "PYTHON=python3"), make(machine, "serve", PYTHON="python3")):
        assert named.stdout.startswith("the wrong one")


def test_make_serve_requires_the_setup_script(machine: Machine) -> None:
    done = make(machine, "serve")
    assert done.returncode != 0
    assert "run ./setup_rocm.sh first, or SSD_ALLOW_CPU=1 make serve" in done.stdout
    assert not (machine.place / "venv").exists()
    assert not machine.calls()


@pytest.mark.parametrize("open_to_all", ["folder", "file"])
def test_environment_file_that_others_can_write_is_refused(machine: Machine, open_to_all: str) -> None:
    assert machine.run().code == 0
    file = machine.environment_file
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    if open_to_all == "file":
        file.chmod(0o622)
    else:
        file.parent.chmod(0o777)
    done = make(machine, "serve")
    assert done.returncode != 0
    assert f"others may write to {file}" in done.stdout
    assert "serves" not in done.stdout
    if open_to_all == "folder":
        outcome = machine.run()
        assert outcome.code == 2
        assert f"others may write to {file.parent}" in outcome.complained


@pytest.mark.parametrize("meant", ["SSD_ALLOW_CPU=1", "SSD_TARGET_DEVICE=cpu:0-3"])
def test_explicit_cpu_needs_no_setup_script(machine: Machine, meant: str) -> None:
    name, _, value = meant.partition("=")
    done = make(machine, "-n", "serve", **{name: value})
    assert '-e ".[structured]"' in done.stdout
    assert f"exec {machine.place / 'venv'}/bin/ssd serve" in done.stdout


def test_nvidia_driver_selects_the_gpu_extras(machine: Machine) -> None:
    (machine.place / "nvidiactl").touch()  # beside the other: a processor with graphics of its own
    done = make(machine, "-n", "serve")
    assert '-e ".[structured,flashinfer,triton]"' in done.stdout
    assert f"exec {machine.place / 'venv'}/bin/ssd serve" in done.stdout


def test_new_driver_changes_the_installed_extras(machine: Machine) -> None:
    (machine.place / "kfd").unlink()
    for name in ("venv/bin/python", "venv/.stamp-serving"):
        path = machine.place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (4e9, 4e9))
    assert "pip" not in make(machine, "-n", "serve").stdout
    (machine.place / "nvidiactl").touch()
    assert '-e ".[structured,flashinfer,triton]"' in make(machine, "-n", "serve").stdout
