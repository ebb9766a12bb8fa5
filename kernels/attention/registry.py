"""Every tree attention backend in one table, the fastest first: its name, where it runs, its module.

Names of settings, messages and the documents follow from it. Knows neither torch nor how a backend is built.
"""

from dataclasses import dataclass
from enum import Enum

AUTO = "auto"
"""Not a backend: the fastest that works."""
VARIABLE = "SSD_TREE_DECODE_BACKEND"
"""Where a backend is asked for."""


class Where(Enum):
    """Devices, as the documents name them."""

    CPUS = "CPUs"
    GPUS = "CUDA, ROCm"
    ANY = "any device"


@dataclass(frozen=True, slots=True)
class RegisteredBackend:
    """A row of the table."""

    name: str
    where: Where
    module: str
    """Has `FACTORY`, an `AttentionFactory`. It is imported wherever torch is: what may be missing is imported
    when a backend is made."""
    what: str
    """What it is, for the documents."""
    package: str = ""
    """The Python package that it needs, and the extra of this project that installs it."""


BACKENDS = (
    RegisteredBackend("native", Where.CPUS, "ssd_serve.kernels.native.attention", "C"),
    RegisteredBackend(
        "flashinfer",
        Where.GPUS,
        "ssd_serve.kernels.flashinfer.factory",
        "upstream's package on CUDA, AMD's port on ROCm; prefixes that lie in order are read in pages of 1, "
        "16 or 64 slots, whichever a measurement at the start finds fastest",
        package="flashinfer",
    ),
    RegisteredBackend(
        "triton",
        Where.GPUS,
        "ssd_serve.kernels.triton.factory",
        "our own kernels: the prefix of a request is read once for all its rows, in parts that are merged by "
        "their log-sum-exp",
        package="triton",
    ),
    RegisteredBackend("sdpa", Where.ANY, "ssd_serve.kernels.attention.sdpa", "PyTorch"),
)


def names(*where: Where) -> tuple[str, ...]:
    """The names of those that run there; without a place, all."""
    return tuple(each.name for each in BACKENDS if not where or each.where in where)


def choices(where: Where) -> str:
    """What to ask for on such devices, in words."""
    *others, last = AUTO, *names(where, Where.ANY)
    return f"{', '.join(others)} or {last}"
