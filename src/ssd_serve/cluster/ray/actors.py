"""The body of a Ray actor: the same role functions as in a worker process of this machine.

The role computes in one thread; other threads answer pings and requests for addresses. Imports of Ray only
what an actor needs to know its node.
"""

import contextlib
import importlib
import os
import shutil
import stat
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from ssd_serve.base.devices import parse_device, pin
from ssd_serve.base.engine_config import config_from_json
from ssd_serve.base.errors import DeviceHangError, PermissionProblemError, SsdError
from ssd_serve.base.logs import RateLimitedLogger, get_logger
from ssd_serve.base.settings_sources import visible_gpus
from ssd_serve.base.trusted_files import is_private
from ssd_serve.cluster.health import ORPHANED
from ssd_serve.cluster.ray.placement import actors_device
from ssd_serve.transport.listener import Listener
from ssd_serve.transport.rank_sockets import RankFiles

LOOPBACK = "127.0.0.1"
_LAST_WORDS_S = 1.0


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """An actor's role, configuration and place."""

    name: str
    """`verifier`, `rank-1`, `drafter-0`."""
    config: str
    """`EngineConfig` as JSON."""
    meeting: str
    """Name of the private folder in which the ranks of this run meet."""
    device: str | None
    """Device, if the user has named it."""
    cpus: int
    """Number of cores, for an actor without named cores."""
    loopback: bool = True
    """True if all clients of the verifier are on its node."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses on which a verifier listens."""

    server: str
    drafters: str


@dataclass(frozen=True, slots=True)
class ActorExit:
    """End of a role: its exit code, and for an error its message."""

    code: int
    why: str = ""


class RoleActor:
    """A worker as a Ray actor. `run` blocks until the worker ends; the other methods answer at once, from
    threads of their own."""

    def __init__(self, order: ActorSpec) -> None:
        self._order = order
        self._config = config_from_json(order.config)
        self._folder = Path(tempfile.gettempdir(), order.meeting)
        self._listeners: list[Listener] = []
        self._error: SsdError | None = None
        self._loaded = threading.Event()
        if order.name == "verifier":
            try:
                self._listeners = [self._listen() for _ in range(2)]
            except SsdError as error:
                self._error = error  # `run` raises it: an error here would have no exit code

    def where(self) -> tuple[int, str]:
        """Process id, and the id of the node."""
        return os.getpid(), str(_ray().get_runtime_context().get_node_id())

    def ping(self) -> tuple[float, bool]:
        """Say that this process can still answer: seconds of processor time, and whether it has loaded."""
        return time.process_time(), self._loaded.is_set()

    def addresses(self) -> Addresses | None:
        """Addresses on which the verifier listens; None if it cannot."""
        if len(self._listeners) < 2:
            return None
        return Addresses(self._listeners[0].address, self._listeners[1].address)

    def leave(self) -> None:
        """Tidy up before this process is killed."""
        if self._order.name == "verifier" and self._config.tensor_parallel > 1:
            shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, addresses: Addresses | None) -> ActorExit:
        """Be the worker until it ends. `addresses`: the verifier's, for a drafter."""
        try:
            if self._error is not None:
                raise self._error
            return ActorExit(self._run(addresses))
        except DeviceHangError as error:
            # Ray would end the interpreter normally, and the driver would wait for that GPU.
            threading.Timer(_LAST_WORDS_S, os._exit, (error.exit_code,)).start()
            return ActorExit(error.exit_code, str(error))
        except SsdError as error:
            return ActorExit(error.exit_code, str(error))

    def _run(self, addresses: Addresses | None) -> int:
        name, config = self._order.name, self._config
        if name.startswith("drafter"):
            if addresses is None:
                return ORPHANED
            config = replace(config, draft_device=self._take_device())
            from ssd_serve.drafter.process import run as draft

            return draft(config, name, [addresses.drafters], on_loaded=self._loaded.set)
        rank = 0 if name == "verifier" else int(name.removeprefix("rank-"))
        config = replace(config, target_device=self._take_device())
        files = RankFiles(self._meeting() if config.tensor_parallel > 1 else self._folder)
        if rank == 0:
            from ssd_serve.verifier.process import run as verify

            return verify(config, self._listeners[0], self._listeners[1], files)
        from ssd_serve.verifier.ranks import run as follow

        follow(config, rank, files)
        return ORPHANED

    def _take_device(self) -> str:
        """Bind this thread, and torch's threads that it starts, to the device."""
        gpus = [str(one) for one in _ray().get_runtime_context().get_accelerator_ids().get("GPU", ())]
        name = actors_device(self._order.device, gpus, visible_gpus())
        device = parse_device(name)
        if device.kind == "cuda" or device.indices:
            pin(device)
        else:
            import torch

            torch.set_num_threads(self._order.cpus)
        return name

    def _listen(self) -> Listener:
        config = self._config
        rate_limited = RateLimitedLogger(get_logger(self._order.name, config.log_level, config.log_format))
        host = LOOPBACK if self._order.loopback else str(_ray().util.get_node_ip_address())
        return Listener.tcp(
            host,
            0,
            config.cluster_key or "",
            lambda why: rate_limited.warning("connection refused", reason=why),
        )

    def _meeting(self) -> Path:
        """The folder of this run on this node: private, whichever rank comes first."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        facts = self._folder.lstat()
        if not stat.S_ISDIR(facts.st_mode) or not is_private(facts):
            raise PermissionProblemError(f"the folder {self._folder} must belong to this user alone")
        return self._folder


def kill_actor(pid: int) -> None:
    """End an actor's process on this node, as a task of Ray."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if RoleActor.__name__ in " ".join(process.cmdline()):
            process.kill()


def _ray() -> Any:
    """Ray's types are not those of a strict program."""
    return importlib.import_module("ray")
