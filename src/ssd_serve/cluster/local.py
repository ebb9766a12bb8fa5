"""The `local` launcher: verifier, ranks and drafters as processes of this machine, each on its device."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ssd_serve.base.devices import Machine, this_machine
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.errors import EngineDeadError, PermissionProblemError, SettingsError
from ssd_serve.base.logs import Logger
from ssd_serve.base.settings import Settings
from ssd_serve.base.trusted_files import cache_folder, is_private, open_lock
from ssd_serve.cluster.health import LONGEST_SILENCE_S, PulseWatch
from ssd_serve.cluster.launch import CONNECT_S, RunningEngine
from ssd_serve.cluster.placement import PinnedModels, Placement, place, resolve_config
from ssd_serve.cluster.process import WorkerPlan, start_worker, worker_command
from ssd_serve.cluster.supervisor import Supervisor
from ssd_serve.transport.channel import SocketChannel
from ssd_serve.transport.listener import connect
from ssd_serve.transport.rank_sockets import RankFiles

_LOCK = "lock"


@dataclass(frozen=True, slots=True)
class RunDir:
    """A private folder and the socket paths in it."""

    path: Path
    temporary: bool
    lock: int
    """Descriptor of a locked file; the kernel unlocks it when this process ends, however it ends."""

    @property
    def server_socket(self) -> str:
        """Socket on which the verifier listens for the server."""
        return str(self.path / "server.sock")

    @property
    def drafter_socket(self) -> str:
        """Socket on which the verifier listens for drafters."""
        return str(self.path / "drafter.sock")

    @property
    def ranks(self) -> RankFiles:
        """Files by which the target's ranks connect."""
        return RankFiles(self.path)

    def remove(self) -> None:
        """Remove what was made here, and the folder if it was made for this run."""
        self.ranks.remove()
        for name in (self.server_socket, self.drafter_socket, self.path / _LOCK):
            Path(name).unlink(missing_ok=True)
        os.close(self.lock)
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)


def make_run_dir(path: Path | None) -> RunDir:
    """Create the folder, or take the one that the user named if it is private and writable."""
    if path is None:
        try:
            path = Path(tempfile.mkdtemp(prefix="ssd-"))
        except OSError as error:
            raise PermissionProblemError(
                f"no temporary folder can be made: {error.strerror}; "
                "set SSD_RUN_DIR to a folder you can write to"
            ) from error
        return RunDir(path, temporary=True, lock=_lock(path))
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = path.stat()
    except OSError as error:
        raise PermissionProblemError(
            f"SSD_RUN_DIR={path} cannot be used: {error.strerror}; name a folder you can write to"
        ) from error
    if not is_private(facts):
        raise PermissionProblemError(
            f"SSD_RUN_DIR={path} must belong to you alone: chmod 700 it, or name another folder"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionProblemError(f"SSD_RUN_DIR={path} is not writable; name another folder")
    return RunDir(path.absolute(), temporary=False, lock=_lock(path))


def _lock(folder: Path) -> int:
    """Two servers in one folder would replace each other's sockets."""
    descriptor = open_lock(folder / _LOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise SettingsError(f"another server uses SSD_RUN_DIR={folder}; name another folder") from error
    return descriptor


Command = Callable[..., Sequence[str]]
"""Makes the command line of a role with its arguments; tests substitute small workers."""


class LocalEngine(RunningEngine):
    """Processes of this machine. Closing also removes their sockets."""

    def __init__(
        self,
        config: EngineConfig,
        placement: Placement,
        run_dir: RunDir,
        log: Logger,
        command: Command = worker_command,
        silence_s: float = LONGEST_SILENCE_S,
    ) -> None:
        """`silence_s`: how long a worker may give no sign of life."""
        plans = _plans(placement, config, run_dir, command)
        pulses = PulseWatch(run_dir.ranks.pulse, longest_silence_s=silence_s)
        supervisor = Supervisor(plans, partial(start_worker, config=config), log, pulses=pulses)
        super().__init__(config, placement, supervisor)
        self._run_dir = run_dir

    def connect(self, timeout_s: float = CONNECT_S) -> SocketChannel:
        try:
            return connect(self._run_dir.server_socket, timeout_s, give_up=lambda: self.supervisor.over)
        except EngineDeadError as error:
            raise self.supervisor.failure or error from None

    def close(self) -> None:
        self.supervisor.stop()
        self._run_dir.remove()


@contextmanager
def local_engine(
    settings: Settings,
    log: Logger,
    *,
    models: PinnedModels | None = None,
    machine: Machine | None = None,
    command: Command = worker_command,
    silence_s: float = LONGEST_SILENCE_S,
) -> Generator[LocalEngine]:
    """Start an engine for the length of a `with` block."""
    placement = place(settings, machine if machine is not None else this_machine())
    if placement.shares_a_device:
        log.warning("target and drafter share a device", target=placement.target, draft=placement.draft)
    if placement.target.kind == "cpu" and len(placement.target.indices) < settings.tensor_parallel:
        log.warning(
            "ranks of the target share cores", target=placement.target, ranks=settings.tensor_parallel
        )
    if placement.draft is not None and 0 < len(placement.draft.indices) < settings.drafter_count:
        log.warning("drafters share a device", draft=placement.draft, drafters=settings.drafter_count)
    run_dir = make_run_dir(settings.run_dir)
    # A warning about the cache folder is logged once, here: workers receive a folder that is private.
    folder = cache_folder(settings.cache_dir, log.warning)
    config = resolve_config(settings, placement, models, cache_dir=folder, run_dir=run_dir.path)
    engine = LocalEngine(config, placement, run_dir, log, command, silence_s)
    try:
        engine.supervisor.start()
        yield engine
    finally:
        engine.close()


def _plans(placement: Placement, config: EngineConfig, run_dir: RunDir, command: Command) -> list[WorkerPlan]:
    folder = str(run_dir.path)
    verifier = command("verifier", run_dir.server_socket, run_dir.drafter_socket, folder)
    plans = [WorkerPlan("verifier", tuple(verifier), vital=True)]
    plans += [
        WorkerPlan(f"rank-{rank}", tuple(command("rank", str(rank), folder)), vital=True)
        for rank in range(1, config.tensor_parallel)
    ]
    names = [f"drafter-{index}" for index in range(config.drafters if placement.draft else 0)]
    plans += [
        WorkerPlan(name, tuple(command("drafter", name, run_dir.drafter_socket)), vital=False)
        for name in names
    ]
    return plans
