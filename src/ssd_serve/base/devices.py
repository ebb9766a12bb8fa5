"""Names of devices (`cpu:0-1`, `cuda:0`), what this machine has, and pinning a process to a device.

torch is imported only inside `pin` and, in a process of its own, to count GPUs. It does not depend on models or roles.
"""

import contextlib
import ctypes
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from ssd_serve.base.errors import SettingsError

_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_NVIDIA, _AMD = Path("/dev/nvidiactl"), Path("/dev/kfd")
_ASK_TORCH = (
    "import torch; "
    "print(torch.cuda.device_count(), torch.__version__, torch.version.hip or '-', torch.version.cuda or '-')"
)
_LONGEST_ANSWER_S = 120
_PR_SET_TIMERSLACK = 29
"""Option of Linux's `prctl`: nanoseconds by which a sleep may end late."""


@dataclass(frozen=True, slots=True)
class Device:
    """Cores or GPUs that one process computes on. No indices: all cores, or the first GPU."""

    kind: Literal["cpu", "cuda"]
    indices: tuple[int, ...] = ()

    def __str__(self) -> str:
        """The shortest text that `parse_device` reads back."""
        return f"{self.kind}:{_as_ranges(self.indices)}" if self.indices else self.kind

    @property
    def torch_name(self) -> str:
        """The name that torch knows: cores are one device there. Raises `SettingsError` for several GPUs."""
        if self.kind == "cpu":
            return "cpu"
        if len(self.indices) > 1:
            raise SettingsError(f"{self} are {len(self.indices)} GPUs where one is meant: write e.g. cuda:0")
        return f"cuda:{self.indices[0] if self.indices else 0}"

    def split(self, ranks: int) -> "tuple[Device, ...]":
        """Return a part for each rank: neighbouring cores or GPUs. Ranks share devices if there are too few."""
        count = len(self.indices)
        if ranks == 1 or not count:
            return (self,) * ranks
        starts = [rank * count // ranks for rank in range(ranks + 1)]
        parts = (self.indices[a : max(b, a + 1)] for a, b in pairwise(starts))
        return tuple(Device(self.kind, part) for part in parts)


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores and GPUs that this process may use."""

    cores: tuple[int, ...]
    gpus: int
    trouble: str = ""
    """Reason why torch can use no GPU although a driver is loaded, with the remedy; empty: no such problem."""


def parse_device(text: str) -> Device:
    """Read `cpu`, `cpu:0`, `cpu:0-1`, `cpu:0,2-3`, `cuda`, `cuda:0` or `cuda:0-3`."""
    kind, colon, rest = text.strip().lower().partition(":")
    if kind not in ("cpu", "cuda"):
        raise SettingsError(f"device '{text}' is unknown: write cpu, cpu:0, cpu:0-1, cpu:0,2 or cuda:0")
    indices: set[int] = set()
    for part in rest.split(",") if colon else ():
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise SettingsError(f"device '{text}': '{part}' is not a number or a range such as 0-1")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise SettingsError(f"device '{text}': the range {part} runs backwards")
        indices.update(range(first, last + 1))
    if kind == "cuda":
        return Device("cuda", tuple(sorted(indices)) or (0,))
    return Device("cpu", tuple(sorted(indices)))


def this_machine(nvidia: Path = _NVIDIA, amd: Path = _AMD, python: str = sys.executable) -> Machine:
    """Return the cores that this process may run on, and the GPUs that torch can use. Without a driver's file
    torch is not imported, which takes seconds."""
    drivers = {"NVIDIA": nvidia, "AMD": amd}
    loaded = {vendor: path for vendor, path in drivers.items() if path.exists()}
    gpus, trouble = _ask_torch(loaded, python) if loaded else (0, "")
    return Machine(available_cores(), gpus, trouble)


_SPINS = 3000
"""Turns that an OpenMP thread waits at a barrier before it sleeps, some tens of microseconds."""


def spin_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a variable that bounds spinning of OpenMP threads, unless the environment has a policy of its own.

    By default threads spin for milliseconds at the barrier of each product, on the core that the late thread
    needs. With one of two cores busy, rounds took ten times longer. OpenMP reads the variable when it is loaded.
    """
    chosen = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environment.keys()
    return {} if chosen else {"GOMP_SPINCOUNT": str(_SPINS)}


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return what tells this processor from others: its name and its instructions."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return str(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def check_device(device: Device, machine: Machine, setting: str) -> None:
    """Raise `SettingsError` if the machine does not have the device."""
    if device.kind == "cuda":
        if max(device.indices, default=0) >= machine.gpus:
            found = f"{machine.gpus} GPU(s)" if machine.gpus else "no GPU that torch can use"
            raise SettingsError(
                f"{setting} is {device}, but this machine has {found}: name another or cpu; `ssd doctor` looks for GPUs"
            )
        return
    missing = [core for core in device.indices if core not in machine.cores]
    if missing:
        raise SettingsError(
            f"{setting} is {device}, but this process may use only the cores {_as_ranges(machine.cores)}"
        )


def pin(device: Device) -> None:
    """Bind the calling process to the device's cores, with one torch thread a core. For a GPU, set the current
    device, precise sleeps, and as many threads as its share of all cores: there is a process for each GPU."""
    import torch

    if device.kind == "cuda":
        torch.cuda.set_device(device.torch_name)
        _sleep_finely()
        torch.set_num_threads(max(1, len(available_cores()) // torch.cuda.device_count()))
        return
    if device.indices and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, device.indices)
        except OSError as error:
            raise SettingsError(f"this process cannot be bound to {device}: {error.strerror}") from error
    torch.set_num_threads(len(device.indices) or len(available_cores()))


def pin_cores(device: Device) -> None:
    """Bind the calling process to the device's cores, for a process that does not use torch."""
    if device.kind == "cpu" and device.indices and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, device.indices)


def _sleep_finely() -> None:
    """Make sleeps of the calling thread, and of threads that it starts, precise: Linux adds 50 us to each, and
    waiting for a GPU polls every 20 us."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)


def available_cores() -> tuple[int, ...]:
    """Return the cores that the calling thread may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _ask_torch(drivers: Mapping[str, Path], python: str) -> tuple[int, str]:
    """Number of GPUs that torch can use, or the reason why it can use none."""
    where = " and ".join(f"an {vendor} GPU ({path})" for vendor, path in drivers.items())
    try:
        answer = subprocess.run(
            [python, "-c", _ASK_TORCH],
            capture_output=True,
            text=True,
            timeout=_LONGEST_ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 0, f"there is {where}, but torch has not answered for {_LONGEST_ANSWER_S} s: a driver hangs"
    words = (answer.stdout.splitlines() or [""])[-1].split()
    if answer.returncode or len(words) != 4:
        why = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        return 0, f"there is {where}, but torch cannot be asked for it: {why}"
    count, version, hip, cuda = int(words[0]), words[1], words[2] != "-", words[3]
    if count:
        return count, ""
    built = "ROCm" if hip else "CPUs" if cuda == "-" else f"CUDA {cuda}"
    fits = hip if "AMD" in drivers else not hip and cuda != "-"
    advice = {
        ("AMD", True): "join the groups of /dev/kfd and /dev/dri, and let HIP_VISIBLE_DEVICES hide none",
        ("AMD", False): "run ./setup_rocm.sh with a Python that has AMD's torch, then what it prints",
        ("NVIDIA", True): f"nvidia-smi must show CUDA {cuda} or newer, and CUDA_VISIBLE_DEVICES hide none",
        ("NVIDIA", False): "install a torch that is built for CUDA",
    }[("AMD" if "AMD" in drivers else "NVIDIA", fits)]
    return 0, f"there is {where}, but torch {version}, built for {built}, can use none: {advice}"


def _as_ranges(indices: tuple[int, ...]) -> str:
    parts: list[str] = []
    position = 0
    while position < len(indices):
        end = position
        while end + 1 < len(indices) and indices[end + 1] == indices[end] + 1:
            end += 1
        parts.append(str(indices[position]) if end == position else f"{indices[position]}-{indices[end]}")
        position = end + 1
    return ",".join(parts)
