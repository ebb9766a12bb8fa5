"""Which launcher runs the engine, and what callers know of a running engine, whoever launched it."""

import importlib.util
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal, Protocol

from ssd_serve.cluster.channels.channel import SocketChannel
from ssd_serve.cluster.local.launcher import local_engine
from ssd_serve.cluster.placement import Placement
from ssd_serve.cluster.supervision.exit_reasons import WorkerDiedError
from ssd_serve.devices import Machine, this_machine
from ssd_serve.errors import NoGpuError
from ssd_serve.logs import Logger
from ssd_serve.settings import Settings

CONNECT_S = 60.0
"""The verifier listens before it loads anything, but importing takes a while on a busy core."""


class RunningEngine(Protocol):
    """A running verifier with its ranks, and its drafters in mode ssd."""

    settings: Settings
    """With nothing about modes and devices left to decide."""

    placement: Placement

    @property
    def failure(self) -> WorkerDiedError | None:
        """Why nothing can be generated any more, or None."""
        ...

    @property
    def restarts(self) -> int:
        """How often workers were started again."""
        ...

    def await_failure(self, timeout_s: float) -> WorkerDiedError | None:
        """Wait for the reason after a channel has closed; None when there is none in time."""
        ...

    def pids(self) -> dict[str, int]:
        """Process ids by name (`verifier`, `rank-1`, `drafter-0`), each on the machine where it runs."""
        ...

    def connect(self, timeout_s: float = CONNECT_S) -> SocketChannel:
        """The channel to the verifier, once it listens, also after it was started again. Raises the reason
        when there will be none."""
        ...

    def target_is_ready(self) -> None:
        """The verifier generates: from now on it is started again, with its ranks, when one of them dies."""
        ...

    def deaths_are_explained(self) -> None:
        """The target's last deaths do not count: the request that caused them will not come again."""
        ...

    def suspect_verifier(self, silent_s: float) -> None:
        """The verifier has said nothing for so long: it is killed and started again unless it computes."""
        ...

    def expect_end(self) -> None:
        """Say before the channel is closed that the workers' end is meant."""
        ...


def chosen_launcher(settings: Settings, machine: Machine) -> Literal["local", "ray"]:
    """What `auto` means: Ray where there is a cluster or more than one GPU, and Ray is installed."""
    if settings.launcher != "auto":
        return settings.launcher
    if settings.ray_address is not None:
        return "ray"
    return "ray" if machine.gpus > 1 and importlib.util.find_spec("ray") is not None else "local"


def usable_machine(settings: Settings, machine: Machine | None = None) -> Machine:
    """This machine. Raises `NoGpuError` where cores would compute although there is a GPU, and nobody has
    said that they are meant."""
    machine = machine if machine is not None else this_machine()
    named = settings.target_device or settings.ray_address
    if machine.trouble and named is None and not settings.allow_cpu:
        raise NoGpuError(f"{machine.trouble}; or let cores compute with SSD_ALLOW_CPU=1")
    return machine


@contextmanager
def start_engine(settings: Settings, log: Logger, machine: Machine | None = None) -> Generator[RunningEngine]:
    """Start an engine for the length of a `with` block. `machine`: as `usable_machine` found it before."""
    machine = machine if machine is not None else usable_machine(settings)
    if chosen_launcher(settings, machine) == "local":
        with local_engine(settings, log, machine=machine) as engine:
            yield engine
        return
    # Ray is imported where it is used, and only there: it takes seconds, and need not be installed.
    from ssd_serve.cluster.ray.launcher import ray_engine

    with ray_engine(settings, log) as engine:
        yield engine
