"""Binding of a process to its device."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ssd_serve.base import devices
from ssd_serve.base.devices import Machine, parse_device, pin, spin_defaults, this_machine

Ask = Callable[..., Machine]


@pytest.mark.parametrize(("cores", "gpus", "threads"), [(64, 8, 8), (64, 1, 64), (4, 8, 1)])
def test_processes_of_several_gpus_share_the_cores(
    cores: int, gpus: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    monkeypatch.setattr(devices, "available_cores", lambda: tuple(range(cores)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", told.append)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    pin(parse_device("cuda:3"))
    assert told == ["cuda:3", threads]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone lengthens sleeps")
def test_pinning_to_a_gpu_makes_sleeps_precise() -> None:
    program = (
        "import ctypes, torch; from ssd_serve.base.devices import parse_device, pin; "
        "torch.cuda.set_device = lambda _: None; torch.cuda.device_count = lambda: 1; "
        "libc = ctypes.CDLL(None); libc.prctl(29, 50000); before = libc.prctl(30); "
        "pin(parse_device('cuda:0')); print(before, libc.prctl(30))"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    before, after = map(int, told.split())
    assert before > after == 1


@pytest.fixture
def ask(tmp_path: Path) -> Ask:

    def found(*drivers: str, says: str = "", fails: str = "") -> Machine:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\necho '{says}'\n" + (f"echo '{fails}' >&2; exit 1\n" if fails else ""))
        python.chmod(0o755)
        for name in drivers:
            (tmp_path / name).touch()
        return this_machine(tmp_path / "nvidiactl", tmp_path / "kfd", str(python))

    return found


def test_torch_is_not_asked_without_a_driver(ask: Ask) -> None:
    machine = ask(fails="asked")
    assert (machine.gpus, machine.trouble) == (0, "")


def test_usable_gpus_are_counted(ask: Ask) -> None:
    for says in ("8 2.9.1 7.2 -", "8 2.13.0+cu130 - 13.0"):
        machine = ask("kfd", "nvidiactl", says=f"a library greets\n{says}")
        assert (machine.gpus, machine.trouble) == (8, "")


@pytest.mark.parametrize(
    ("driver", "says", "sentence"),
    [
        (
            "kfd",
            "0 2.13.0+cu130 - 13.0",
            r"an AMD GPU .* for CUDA 13.0, can use none: run ./setup_rocm",
        ),
        ("kfd", "0 2.13.0+cpu - -", "built for CPUs, can use none: run ./setup_rocm.sh"),
        ("kfd", "0 2.9.1 7.2 -", "built for ROCm, can use none: join the groups of /dev/kfd and /dev/dri"),
        ("nvidiactl", "0 2.13.0+cu130 - 13.0", "can use none: nvidia-smi must show CUDA 13.0"),
        ("nvidiactl", "0 2.13.0+cpu - -", "built for CPUs, can use none: install a torch .* for CUDA"),
        ("nvidiactl", "0 2.9.1 7.2 -", "built for ROCm, can use none: install a torch .* for CUDA"),
        ("nvidiactl", "something else", "cannot be asked for it"),
    ],
)
def test_unusable_gpu_error_names_the_remedy(ask: Ask, driver: str, says: str, sentence: str) -> None:
    machine = ask(driver, says=says)
    assert machine.gpus == 0
    assert re.search(sentence, machine.trouble)
    assert "\n" not in machine.trouble


def test_error_of_a_broken_torch_is_quoted(ask: Ask) -> None:
    machine = ask("nvidiactl", fails="ImportError: libcudart.so.13: cannot open")
    assert machine.trouble.endswith("cannot be asked for it: ImportError: libcudart.so.13: cannot open")


@pytest.mark.parametrize("chosen", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_spinning_of_threads_is_bounded_unless_the_user_chose_a_policy(chosen: str) -> None:
    assert set(spin_defaults({"PATH": "/bin"})) == {"GOMP_SPINCOUNT"}
    assert spin_defaults({chosen: "active"}) == {}
