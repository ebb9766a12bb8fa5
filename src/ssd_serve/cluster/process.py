"""A worker process as its parent handles it: configuration, secrets, start, end.

A worker's standard input stays open as its lifeline: when the parent dies, the kernel closes the pipe and the
worker exits. A worker receives only the secrets that its role needs, and none in its environment. A drafter
that is taken over can neither use the API, nor read models with the hub's token, nor join other clusters."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import psutil  # type: ignore[import-untyped]

from ssd_serve.base.devices import spin_defaults
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.errors import SsdError
from ssd_serve.base.names import hub_id
from ssd_serve.base.settings import HUB_TOKEN_VARIABLE, OTHER_VARIABLES, PREFIX, SECRETS
from ssd_serve.cluster.health import PARENTS_SIGNALS
from ssd_serve.drafter.sources.registry import self_draft_layers

_RAYS_OWN = "RAY_AUTH_TOKEN"
_OTHERS = frozenset({HUB_TOKEN_VARIABLE, "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACEHUB_API_TOKEN", _RAYS_OWN})
_SECRET_VARIABLES = (
    _OTHERS
    | {PREFIX + name.upper() for name in SECRETS}
    | {other for name, other in OTHER_VARIABLES.items() if name in SECRETS}
)


def config_for(worker: str, config: EngineConfig, *, elsewhere: bool = False) -> EngineConfig:
    """The configuration that the worker of this name receives: a drafter's own draft models, no secret that
    the worker does not need. `elsewhere`: it may be on another machine, where it downloads its model itself
    and connects over TCP; on this machine that was done before it was started."""
    role, _, number = worker.partition("-")
    own = config.for_drafter(int(number)) if role == "drafter" else config
    key = role != "rank" and (elsewhere or (role == "verifier" and config.drafter_address is not None))
    drafts = tuple(config.target if self_draft_layers(name) else name for name in own.draft_models)
    models = {"drafter": drafts, "rank": (config.target,)}.get(role, (config.target, *drafts))
    token = elsewhere and any(hub_id(name) for name in models)
    return replace(
        own,
        cluster_key=config.cluster_key if key else None,
        hf_token=config.hf_token if token else None,
    )


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Copy an environment without secrets and without settings: workers receive their configuration."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _SECRET_VARIABLES and not name.startswith(PREFIX)
    }


@contextmanager
def hidden_secrets() -> Generator[None]:
    """For the length of a `with` block this process's environment has no secrets but Ray's own: what Ray
    starts meanwhile inherits it."""
    hidden = {name: os.environ.pop(name) for name in _blanked() if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def blanked_secrets() -> dict[str, str]:
    """Variables that hide those of a process that starts ours: an empty one counts as none."""
    return dict.fromkeys(_blanked(), "")


def _blanked() -> list[str]:
    return sorted(_SECRET_VARIABLES - {_RAYS_OWN})


_STDERR = 2
_KILL_S = 10.0
_SHAPES = "256"
"""Number of products that oneDNN caches: those of the last fifty batch sizes. A new one takes about 0.5 ms.
"""
_DEFAULTS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "LRU_CACHE_CAPACITY": _SHAPES,
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": _SHAPES,
}
"""Variables that are set unless the user has set them."""
_FAST_MEMORY = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}


class StartedWorker(ABC):
    """A started worker as its supervisor sees it, wherever it runs."""

    name: str
    started: float
    """Time of the start, in seconds of the monotonic clock."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id on its machine; 0 while it is not known."""

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that killed it, or SIGKILL if its node is gone."""

    @property
    def age_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    @abstractmethod
    def computed_s(self) -> float:
        """Seconds of processor time that all its threads have taken; 0 if unknown."""

    @property
    def waits_for_disk(self) -> bool:
        """True if the kernel blocks it until a read or write is done; False if unknown."""
        return False

    @abstractmethod
    def release(self) -> None:
        """Let it leave by itself. Does not wait."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once. Does not wait."""

    @abstractmethod
    def stop(self, grace_s: float = 3.0) -> int:
        """Release it, and kill it if it has not left in time. Returns its exit code."""


class WorkerProcess(StartedWorker):
    """A worker process of this machine. Start workers from a thread that lives as long as this process: on Linux
    the worker also dies with the *thread* that started it."""

    def __init__(self, name: str, popen: "subprocess.Popen[bytes]") -> None:
        self.name = name
        self.popen = popen
        self.started = time.monotonic()

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def exit_code(self) -> int | None:
        return self.popen.poll()

    @property
    def computed_s(self) -> float:
        try:
            times = psutil.Process(self.pid).cpu_times()
        except (psutil.Error, OSError):  # OSError: no descriptor to look with
            return 0.0
        return float(times.user + times.system)

    @property
    def waits_for_disk(self) -> bool:
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_DISK_SLEEP)
        except (psutil.Error, OSError):
            return False

    def release(self) -> None:
        if self.popen.stdin is not None:  # its lifeline
            with contextlib.suppress(OSError):
                self.popen.stdin.close()

    def kill(self) -> None:
        self.popen.kill()

    def stop(self, grace_s: float = 3.0) -> int:
        self.release()
        try:
            return self.popen.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
        try:
            return self.popen.wait(_KILL_S)
        except subprocess.TimeoutExpired:  # the kernel holds it, as a GPU's driver may for ever
            return -signal.SIGKILL


def worker_command(*arguments: str) -> tuple[str, ...]:
    """The command that runs a worker of this installation."""
    return (sys.executable, "-m", "ssd_serve.cluster.worker", *arguments)


def worker_environment() -> dict[str, str]:
    """This process's environment, and what makes torch's memory fast on CPUs.

    Huge pages for weights: 5-25 % more bandwidth for one row. A heap that keeps what was freed: the results
    of operators are taken from memory that is mapped already, instead of being mapped page by page every
    time. Both are read when a process starts, so that they cannot be settings of the worker's. oneDNN keeps
    half a MiB for every shape of a product, in two caches of 1024 shapes unless they are bounded: a process
    would grow for hours. Ranks on GPUs meet on loopback, unless the user names another network. OpenMP threads
    spin for a bounded time.
    """
    return {**_DEFAULTS, **spin_defaults(os.environ), **os.environ, **_FAST_MEMORY}


def added_environment() -> dict[str, str]:
    """Variables that `worker_environment` adds to a machine's own environment."""
    return {**_DEFAULTS, **spin_defaults({}), **_FAST_MEMORY}


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """Command of a worker. `vital`: it belongs to the target, without which nothing works."""

    name: str
    command: tuple[str, ...]
    vital: bool = False


Starter = Callable[[WorkerPlan], StartedWorker]
"""Starts a worker where the launcher wants it."""


def start_worker(plan: WorkerPlan, config: EngineConfig) -> WorkerProcess:
    """Start a worker and send it its configuration as one JSON line. Its stdout goes to our
    stderr."""
    # Blocked signals stay blocked in the child, so none can end it before it ignores them by itself.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_SIGNALS)
    try:
        environment = without_secrets(worker_environment())
        popen = subprocess.Popen(plan.command, stdin=subprocess.PIPE, stdout=_STDERR, env=environment)
    except OSError as error:
        raise SsdError(f"the process {plan.name} cannot be started: {error.strerror}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if popen.stdin is not None:
        # A worker that died at once is noticed by its exit code, not here.
        with contextlib.suppress(BrokenPipeError):
            popen.stdin.write(config_for(plan.name, config).to_json().encode() + b"\n")
            popen.stdin.flush()
    return WorkerProcess(plan.name, popen)
