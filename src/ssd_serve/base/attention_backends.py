"""Every tree attention backend in one table, the fastest first: its name, where it runs, how it is made.

Names of settings, messages and the documents follow from it. Imports neither torch nor a backend.
"""

from dataclasses import dataclass
from enum import Enum

AUTO = "auto"
"""Not a backend: the fastest that works."""
VARIABLE = "SSD_TREE_DECODE_BACKEND"
"""Setting that names a backend."""


class Where(Enum):
    """Devices, as the documents name them."""

    CPUS = "CPUs"
    GPUS = "CUDA, ROCm"
    ANY = "any device"


@dataclass(frozen=True, slots=True)
class RegisteredBackend:
    """A row of the table."""

    where: Where
    factory: str
    """Path of its `AttentionFactory`, `module:name`. The module is imported wherever torch is: what may be
    missing is imported when a backend is made."""
    what: str
    """Description for the documents."""
    package: str = ""
    """The Python package that it needs, and the extra of this project that installs it."""


BACKENDS = {
    "native": RegisteredBackend(Where.CPUS, "ssd_serve.kernels.native.attention:FACTORY", "C"),
    "flashinfer": RegisteredBackend(
        Where.GPUS,
        "ssd_serve.kernels.flashinfer.factory:FACTORY",
        "upstream's package on CUDA, AMD's port on ROCm; prefixes that lie in order are read in pages of 1, "
        "16 or 64 slots, whichever a measurement at the start finds fastest",
        package="flashinfer",
    ),
    "triton": RegisteredBackend(
        Where.GPUS,
        "ssd_serve.kernels.triton:FACTORY",
        "our own kernels: the prefix of a request is read once for all its rows, in parts that are merged by "
        "their log-sum-exp",
        package="triton",
    ),
    "sdpa": RegisteredBackend(Where.ANY, "ssd_serve.kernels.attention.sdpa:FACTORY", "PyTorch"),
}
"""Backends by name, the fastest first."""


def names(*where: Where) -> tuple[str, ...]:
    """The names of those that run there; without a place, all."""
    return tuple(name for name, each in BACKENDS.items() if not where or each.where in where)


def described() -> str:
    """Describe all backends, with the devices on which they run."""
    return ", ".join(f"{name} ({each.where.value})" for name, each in BACKENDS.items())


def choices(where: Where) -> str:
    """List the values of the setting that work on such devices."""
    *others, last = AUTO, *names(where, Where.ANY)
    return f"{', '.join(others)} or {last}"
