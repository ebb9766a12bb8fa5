"""A running engine, and the choice of the launcher that starts it: processes of this machine, or Ray."""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

from ssd_serve.base.devices import Machine, this_machine
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.errors import NoGpuError
from ssd_serve.base.logs import Logger
from ssd_serve.base.settings import Settings
from ssd_serve.cluster.placement import PinnedModels, Placement
from ssd_serve.cluster.supervisor import Supervisor
from ssd_serve.transport.channel import SocketChannel

CONNECT_S = 180.0
"""The verifier listens before it loads anything, but importing takes a while on busy cores or from a slow
disk. If it dies meanwhile, waiting ends at once."""


class RunningEngine(ABC):
    """A verifier with its ranks, and its drafters in mode ssd.

    `config` and `placement` hold what was decided about models, modes and devices; `supervisor` watches the
    worker processes.
    """

    def __init__(self, config: EngineConfig, placement: Placement, supervisor: Supervisor) -> None:
        self.config = config
        self.placement = placement
        self.supervisor = supervisor

    @abstractmethod
    def connect(self, timeout_s: float = CONNECT_S) -> SocketChannel:
        """Return the channel to the verifier once it listens, also after a restart. Raises the reason if the
        verifier will never listen."""

    @abstractmethod
    def close(self) -> None:
        """End all workers."""


def chosen_launcher(settings: Settings, machine: Machine) -> Literal["local", "ray"]:
    """Resolve launcher `auto`: Ray if there is a cluster or more than one GPU and Ray is installed, else
    local."""
    if settings.launcher != "auto":
        return settings.launcher
    if settings.ray_address is not None:
        return "ray"
    return "ray" if machine.gpus > 1 and importlib.util.find_spec("ray") is not None else "local"


def usable_machine(settings: Settings, machine: Machine | None = None) -> Machine:
    """Return this machine. Raises `NoGpuError` if cores would compute although there is a GPU, and the user
    has not chosen cores."""
    machine = machine if machine is not None else this_machine()
    named = settings.target_device or settings.ray_address
    if machine.trouble and named is None and not settings.allow_cpu:
        raise NoGpuError(f"{machine.trouble}; or let cores compute with SSD_ALLOW_CPU=1")
    return machine


@contextmanager
def start_engine(
    settings: Settings, log: Logger, machine: Machine | None = None, models: PinnedModels | None = None
) -> Generator[RunningEngine]:
    """Start an engine for the length of a `with` block. `machine`: as `usable_machine` found it before."""
    machine = machine if machine is not None else usable_machine(settings)
    if chosen_launcher(settings, machine) == "local":
        from ssd_serve.cluster.local import local_engine

        with local_engine(settings, log, models=models, machine=machine) as engine:
            yield engine
        return
    # Ray is imported where it is used, and only there: it takes seconds, and need not be installed.
    from ssd_serve.cluster.ray.launcher import ray_engine

    with ray_engine(settings, log, models=models) as engine:
        yield engine
