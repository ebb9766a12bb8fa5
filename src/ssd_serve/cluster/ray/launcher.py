"""The `ray` launcher: the target's ranks and the drafters as Ray actors on one node or on several.

Ray places, starts and ends them, and reports lost ones; tokens and trees pass through the same channels as
between processes of one machine. The rules of restarting are the supervisor's.
"""

import contextlib
import secrets
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from ssd_serve.base.devices import this_machine
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.errors import EngineDeadError, SettingsError, in_a_line
from ssd_serve.base.logs import Logger
from ssd_serve.base.settings import Settings
from ssd_serve.cluster.health import HeartbeatReceiver
from ssd_serve.cluster.launch import CONNECT_S, RunningEngine
from ssd_serve.cluster.placement import PinnedModels, resolve_config
from ssd_serve.cluster.process import (
    StartedWorker,
    WorkerPlan,
    added_environment,
    blanked_secrets,
    config_for,
)
from ssd_serve.cluster.ray.actors import ActorExit, ActorSpec, Addresses, RoleActor, kill_actor
from ssd_serve.cluster.ray.cluster import RayCluster, ray_cluster, warn_without_token
from ssd_serve.cluster.ray.placement import STRATEGY, GpuShare, RayPlacement, check_gpus_are_known, ray_place
from ssd_serve.cluster.supervisor import Supervisor
from ssd_serve.transport.channel import SocketChannel
from ssd_serve.transport.listener import connect

_CONTROL = "control"
_PING_EVERY_S = 1.0
LONGEST_SILENCE_S = 15.0
"""Pings pass through Ray on busy nodes: more patience than for heartbeats on this machine."""
ALL_VISIBLE = {f"RAY_EXPERIMENTAL_NOSET_{kind}_VISIBLE_DEVICES": "1" for kind in ("CUDA", "HIP", "ROCR")}
"""Actors see every GPU of their node; `actors_device` selects theirs."""


class RayWorker(StartedWorker):
    """An actor, with its outstanding answers."""

    def __init__(self, ray: Any, name: str, handle: Any, running: Any, log: Logger) -> None:
        """`running`: Ray's promise of the role's `ActorExit`."""
        self.name = name
        self.handle = handle
        self._ray = ray
        self._running = running
        self._log = log
        self._where = self.ask("where")
        self.started = time.monotonic()
        self.last_computed_s = 0.0
        self.loaded = False
        self._code: int | None = None
        self._left: Any = None

    def ask(self, method: str) -> Any:
        """Ray's promise of the answer of a thread that is not the role's."""
        return getattr(self.handle, method).options(concurrency_group=_CONTROL).remote()

    @property
    def pid(self) -> int:
        return self._place()[0]

    @property
    def node(self) -> str:
        """Id of its node; empty while it is not known."""
        return self._place()[1]

    @property
    def exit_code(self) -> int | None:
        if self._code is None and self._is_there(self._running):
            self._code = self._read_end()
        return self._code

    @property
    def computed_s(self) -> float:
        return self.last_computed_s

    def release(self) -> None:
        if self._left is None and self.exit_code is None:
            self._left = self.ask("leave")

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # it may be gone already, and so may Ray
            self._ray.kill(self.handle, no_restart=True)

    def stop(self, grace_s: float = 3.0) -> int:
        self.release()
        if self._left is not None:
            with contextlib.suppress(Exception):
                self._ray.get(self._left, timeout=grace_s if self.pid else 0.0)
        self.kill()
        if not self._ray.wait([self._running], timeout=grace_s)[0]:
            self._kill_process()
        return self.exit_code or -signal.SIGKILL

    def _kill_process(self) -> None:
        """Kill the process itself: Ray's request to end does not reach one that is stopped or hangs."""
        pid, node = self._place()
        if not pid:
            return
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        self._ray.remote(kill_actor).options(num_cpus=0, scheduling_strategy=affinity).remote(pid)

    def _place(self) -> tuple[int, str]:
        if not self._is_there(self._where):
            return 0, ""
        try:
            pid, node = self._ray.get(self._where)
        except self._ray.exceptions.RayError:
            return 0, ""
        return int(pid), str(node)

    def _is_there(self, promise: Any) -> bool:
        return bool(self._ray.wait([promise], timeout=0)[0])

    def _read_end(self) -> int:
        try:
            end: ActorExit = self._ray.get(self._running)
        except self._ray.exceptions.RayTaskError as error:
            self._say(f"ssd: {self.name} has failed\n{error}")
            return 1
        except self._ray.exceptions.RayError as error:
            self._log.debug("actor lost", name=self.name, why=in_a_line(error))
            return -signal.SIGKILL
        # Here, and not by the actor: what an actor writes comes late, or after this process has ended.
        self._say(f"ssd: {self.name}: {end.why}" if end.why else "")
        return end.code

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text + "\n" if text else "")


class ActorStarter:
    """Starts the actors of one engine in its placement group."""

    def __init__(
        self,
        config: EngineConfig,
        cluster: RayCluster,
        group: Any,
        placement: RayPlacement,
        meeting: str,
        log: Logger,
    ) -> None:
        """`meeting`: name of the folder in which the ranks of this run meet."""
        self._config = config
        self._cluster = cluster
        self._group = group
        self._placement = placement
        self._meeting = meeting
        self._log = log
        self.workers: dict[str, RayWorker] = {}
        """The newest of every name."""
        self.addresses: Any = None
        """Ray's promise of the newest verifier's `Addresses`."""

    def start(self, plan: WorkerPlan) -> RayWorker:
        """Start the actor `plan.name`; returns before it runs. It waits for its bundle if a node was lost."""
        ray = self._cluster.ray
        drafter = plan.name.startswith("drafter")
        number = 0 if plan.name == "verifier" else int(plan.name.rpartition("-")[2])
        share = self._placement.drafter if drafter else self._placement.rank
        named = share.of(number, self._placement.drafters if drafter else self._placement.ranks)
        own = config_for(plan.name, self._config, elsewhere=True)
        order = ActorSpec(plan.name, own.to_json(), self._meeting, named, share.cpus, self._all_here())
        handle = self._actor(share, 1 + number if drafter else 0).remote(order)
        # A drafter begins when the verifier's addresses are known; Ray waits for that too.
        running = handle.run.remote(self.addresses if drafter else None)
        worker = RayWorker(ray, plan.name, handle, running, self._log)
        if plan.name == "verifier":
            self._let_drafters_go()
            self.addresses = worker.ask("addresses")
        self.workers[plan.name] = worker
        return worker

    def _actor(self, share: GpuShare, bundle: int) -> Any:
        ray = self._cluster.ray
        actor = ray.remote(concurrency_groups={_CONTROL: 2})(RoleActor)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=bundle
        )
        return actor.options(
            num_cpus=share.cpus,
            num_gpus=share.gpus,
            max_restarts=0,
            max_task_retries=0,
            runtime_env={"env_vars": {**added_environment(), **blanked_secrets(), **ALL_VISIBLE}},
            scheduling_strategy=strategy,
        )

    def _all_here(self) -> bool:
        """True if every bundle is on this process's node, so that loopback reaches all."""
        nodes = self._cluster.bundle_nodes(self._group)
        return bool(nodes) and set(nodes.values()) == {self._cluster.own_node}

    def _let_drafters_go(self) -> None:
        """Kill drafters that know the address of an earlier verifier; they are restarted."""
        for name, worker in self.workers.items():
            if name.startswith("drafter"):
                worker.kill()


class PingWatch(HeartbeatReceiver):
    """Asks every actor for a sign of life, every second. One is watched from its first answer on."""

    def __init__(
        self,
        ray: Any,
        workers: Callable[[], Mapping[str, RayWorker]],
        longest_silence_s: float,
    ) -> None:
        self._ray = ray
        self._workers = workers
        self._longest_silence_s = longest_silence_s
        self._asked: dict[str, tuple[RayWorker, Any]] = {}
        self._answered_at: dict[str, float] = {}
        self._next = 0.0

    def silent(self) -> dict[str, float]:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _PING_EVERY_S
            for name, worker in list(self._workers().items()):
                self._ask(name, worker, now)
        silence = {name: now - answered_at for name, answered_at in self._answered_at.items()}
        return {name: seconds for name, seconds in silence.items() if seconds > self._longest_silence_s}

    def has_loaded(self, name: str) -> bool:
        worker = self._workers().get(name)
        return worker is not None and worker.loaded

    def forget(self, name: str) -> None:
        self._answered_at.pop(name, None)

    def close(self) -> None:
        self._asked.clear()
        self._answered_at.clear()

    def _ask(self, name: str, worker: RayWorker, now: float) -> None:
        asked = self._asked.get(name)
        if asked is not None and asked[0] is worker:
            if not self._ray.wait([asked[1]], timeout=0)[0]:
                return
            try:
                worker.last_computed_s, worker.loaded = self._ray.get(asked[1])
                self._answered_at[name] = now
            except self._ray.exceptions.RayError:
                self._answered_at.pop(name, None)  # it is dead, as its exit code shows
        else:
            self._answered_at.pop(name, None)
        self._asked[name] = (worker, worker.ask("ping"))


def resolved_addresses(ray: Any, promise: Any, timeout_s: float) -> Addresses | None:
    """The addresses once they are promised and known; None while they are not, or when the verifier died."""
    if promise is None or not ray.wait([promise], timeout=timeout_s)[0]:
        return None
    try:
        found: Addresses | None = ray.get(promise)
    except ray.exceptions.RayError:
        return None
    return found


_LOOK_EVERY_S = 0.2
_PLACE_S = 60.0
_TELL_EVERY_S = 60.0
_KEY_BYTES = 32


class RayEngine(RunningEngine):
    """Actors of a Ray cluster."""

    def __init__(
        self,
        config: EngineConfig,
        cluster: RayCluster,
        decision: RayPlacement,
        group: Any,
        log: Logger,
        silence_s: float = LONGEST_SILENCE_S,
    ) -> None:
        """`silence_s`: how long an actor may give no sign of life."""
        self._cluster = cluster
        self._key = config.cluster_key or ""
        self._actors = ActorStarter(config, cluster, group, decision, f"ssd-{secrets.token_hex(8)}", log)
        pulses = PingWatch(cluster.ray, lambda: self._actors.workers, silence_s)
        supervisor = Supervisor(
            _plans(decision),
            self._actors.start,
            log,
            pulses=pulses,
        )
        super().__init__(config, decision.placement, supervisor)

    def nodes(self) -> dict[str, str]:
        """Ids of the nodes on which the actors are, by name; of those that run."""
        return {name: worker.node for name, worker in list(self._actors.workers.items()) if worker.node}

    def connect(self, timeout_s: float = CONNECT_S) -> SocketChannel:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            promise = self._actors.addresses
            found = resolved_addresses(self._cluster.ray, promise, _LOOK_EVERY_S)
            if self.supervisor.over:
                break
            if found is None:
                time.sleep(_LOOK_EVERY_S / 10)
                continue
            try:
                return connect(
                    found.server,
                    deadline - time.monotonic(),
                    key=self._key,
                    give_up=partial(self._is_over, promise),
                )
            except (EngineDeadError, SettingsError):
                # It died, and another process may have its port by now: the next verifier has new addresses.
                time.sleep(_LOOK_EVERY_S / 10)
        raise self.supervisor.failure or EngineDeadError(
            f"the verifier does not listen after {timeout_s:.0f} s: has a node of the cluster room for it?"
        )

    def close(self) -> None:
        self.supervisor.stop()

    def _is_over(self, promise: Any) -> bool:
        """True if the verifier of this promise will never answer."""
        return self.supervisor.over or self._actors.addresses is not promise


@contextmanager
def ray_engine(
    settings: Settings,
    log: Logger,
    *,
    models: PinnedModels | None = None,
    place_s: float = _PLACE_S,
    silence_s: float = LONGEST_SILENCE_S,
) -> Generator[RayEngine]:
    """Start an engine for the length of a `with` block, in the cluster that is named or one of its own. For
    `place_s` seconds it waiting for devices that other jobs use."""
    with ray_cluster(settings) as cluster:
        warn_without_token(cluster.ray, log)
        nodes = cluster.nodes
        check_gpus_are_known(settings, nodes, lambda: this_machine().gpus)
        decision = ray_place(settings, nodes)
        group = cluster.ray.util.placement_group(decision.bundles, strategy=STRATEGY)
        try:
            await_room(group, decision.bundles, place_s, log)
            key = settings.cluster_key or secrets.token_hex(_KEY_BYTES)
            config = resolve_config(settings, decision.placement, models, cluster_key=key)
            engine = RayEngine(config, cluster, decision, group, log, silence_s)
            try:
                engine.supervisor.start()
                yield engine
            finally:
                engine.close()
        finally:
            cluster.ray.util.remove_placement_group(group)


def await_room(group: Any, bundles: list[dict[str, float]], seconds: float, log: Logger) -> None:
    """Wait until Ray has given a placement group its devices. Raises `SettingsError` when it has not."""
    deadline = time.monotonic() + seconds
    while not group.wait(min(_TELL_EVERY_S, max(0.0, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            raise SettingsError(
                f"the Ray cluster has had no free {bundles} for {seconds:.0f} s: other jobs use its devices "
                "(`ray status` shows them)"
            )
        log.warning("waiting for devices that other jobs use", wanted=bundles)


def _plans(decision: RayPlacement) -> list[WorkerPlan]:
    names = ["verifier", *(f"rank-{rank}" for rank in range(1, decision.ranks))]
    plans = [WorkerPlan(name, (), vital=True) for name in names]
    return plans + [WorkerPlan(f"drafter-{one}", (), vital=False) for one in range(decision.drafters)]
