"""Ray actors as their supervisor sees them: started in their bundle, watched by pings, ended.

Knows actors, bundles and addresses; the rules of restarting are the supervisor's.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.errors import in_a_line
from ssd_serve.base.logs import Logger
from ssd_serve.cluster.process import WorkerPlan, added_environment, blanked_secrets, config_for
from ssd_serve.cluster.ray.actors import ActorExit, ActorSpec, Addresses, RoleActor, kill_actor
from ssd_serve.cluster.ray.cluster import RayCluster
from ssd_serve.cluster.ray.placement import GpuShare, RayPlacement

_CONTROL = "control"
_PING_EVERY_S = 1.0
LONGEST_SILENCE_S = 15.0
"""Pings pass through Ray on busy nodes: more patience than for heartbeats on this machine."""
ALL_VISIBLE = {f"RAY_EXPERIMENTAL_NOSET_{kind}_VISIBLE_DEVICES": "1" for kind in ("CUDA", "HIP", "ROCR")}
"""Actors see every GPU of their node; `actors_device` selects theirs."""


class RayWorker:
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
        self.computed_s = 0.0
        """Seconds of processor time, as last reported."""
        self.loaded = False
        self._code: int | None = None
        self._left: Any = None

    def ask(self, method: str) -> Any:
        """Ray's promise of the answer of a thread that is not the role's."""
        return getattr(self.handle, method).options(concurrency_group=_CONTROL).remote()

    @property
    def pid(self) -> int:
        """Process id on its node; 0 while it is not known."""
        return self._place()[0]

    @property
    def node(self) -> str:
        """Id of its node; empty while it is not known."""
        return self._place()[1]

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: it was killed, or its node is gone."""
        if self._code is None and self._is_there(self._running):
            self._code = self._read_end()
        return self._code

    @property
    def age_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def waits_for_disk(self) -> bool:
        """Always False: this is unknown for a process of another node."""
        return False

    def release(self) -> None:
        """Let it tidy up."""
        if self._left is None and self.exit_code is None:
            self._left = self.ask("leave")

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(Exception):  # it may be gone already, and so may Ray
            self._ray.kill(self.handle, no_restart=True)

    def stop(self, grace_s: float = 3.0) -> int:
        """Let it tidy up, and kill it."""
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
        homes = self._cluster.homes(self._group)
        return bool(homes) and set(homes.values()) == {self._cluster.own_node}

    def _let_drafters_go(self) -> None:
        """Kill drafters that know the address of an earlier verifier; they are restarted."""
        for name, worker in self.workers.items():
            if name.startswith("drafter"):
                worker.kill()


class PingWatch:
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
        """Silent actors with the seconds of their silence."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _PING_EVERY_S
            for name, worker in list(self._workers().items()):
                self._ask(name, worker, now)
        silence = {name: now - answered_at for name, answered_at in self._answered_at.items()}
        return {name: seconds for name, seconds in silence.items() if seconds > self._longest_silence_s}

    def has_loaded(self, name: str) -> bool:
        """True if the actor has reported that it has loaded."""
        worker = self._workers().get(name)
        return worker is not None and worker.loaded

    def forget(self, name: str) -> None:
        """Reset a restarted actor: it is watched from its first answer on."""
        self._answered_at.pop(name, None)

    def close(self) -> None:
        """Stop all pings."""
        self._asked.clear()
        self._answered_at.clear()

    def _ask(self, name: str, worker: RayWorker, now: float) -> None:
        asked = self._asked.get(name)
        if asked is not None and asked[0] is worker:
            if not self._ray.wait([asked[1]], timeout=0)[0]:
                return
            try:
                worker.computed_s, worker.loaded = self._ray.get(asked[1])
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
