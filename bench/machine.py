"""What a result was measured on: hardware and versions, as they stand in every result file."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

_PACKAGES = ("ssd-serve", "torch", "numpy", "tokenizers", "transformers")


def measured_on() -> dict[str, object]:
    """The last fields of every result file."""
    return {"hardware": hardware(), "versions": versions()}


def hardware() -> dict[str, object]:
    """Processor, cores, memory and GPUs of this machine."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus,
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    """Python and the packages that decide speed."""
    found = {"python": platform.python_version()}
    found.update({package: installed for package in _PACKAGES if (installed := _version(package))})
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
