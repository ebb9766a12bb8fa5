"""The `local` launcher: verifier, other ranks of the target, and drafters as processes of this machine, each
on its device.

Knows roles, devices and sockets; the workers' inner life and the meaning of messages are theirs.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial

from ssd_serve.base.devices import Machine, this_machine
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.errors import EngineDeadError
from ssd_serve.base.logs import Logger
from ssd_serve.base.owned import cache_folder
from ssd_serve.base.settings import Settings
from ssd_serve.cluster.local.process import WorkerPlan, start_worker, worker_command
from ssd_serve.cluster.local.run_dir import RunDir, make_run_dir
from ssd_serve.cluster.placement import PinnedModels, Placement, place, resolve_config
from ssd_serve.cluster.running import CONNECT_S, RunningEngine
from ssd_serve.cluster.supervision.exit_reasons import WorkerDiedError
from ssd_serve.cluster.supervision.pulse import LONGEST_SILENCE_S, PulseWatch
from ssd_serve.cluster.supervision.supervisor import Supervisor
from ssd_serve.transport.channel import SocketChannel
from ssd_serve.transport.listener import connect

Command = Callable[..., Sequence[str]]
"""From a role and its arguments to a command line; tests put tiny workers here."""


class LocalEngine(RunningEngine):
    """Processes of this machine. Closing also removes their sockets."""

    def __init__(
        self,
        config: EngineConfig,
        placement: Placement,
        run_dir: RunDir,
        log: Logger,
        command: Command = worker_command,
        on_failure: Callable[[WorkerDiedError], None] = lambda _error: None,
        silence_s: float = LONGEST_SILENCE_S,
    ) -> None:
        """`silence_s`: how long a worker may give no sign of life."""
        plans = _plans(placement, config, run_dir, command)
        pulses = PulseWatch(run_dir.ranks.pulse, longest_silence_s=silence_s)
        supervisor = Supervisor(
            plans, partial(start_worker, config=config), log, on_failure=on_failure, pulses=pulses
        )
        super().__init__(config, placement, supervisor)
        self._run_dir = run_dir

    def connect(self, timeout_s: float = CONNECT_S) -> SocketChannel:
        try:
            return connect(self._run_dir.server_socket, timeout_s, give_up=lambda: self._supervisor.over)
        except EngineDeadError as error:
            raise self._supervisor.failure or error from None

    def close(self) -> None:
        self._supervisor.stop()
        self._run_dir.remove()


@contextmanager
def local_engine(
    settings: Settings,
    log: Logger,
    *,
    models: PinnedModels | None = None,
    machine: Machine | None = None,
    command: Command = worker_command,
    on_failure: Callable[[WorkerDiedError], None] = lambda _error: None,
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
    engine = LocalEngine(config, placement, run_dir, log, command, on_failure, silence_s)
    try:
        engine.start()
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
