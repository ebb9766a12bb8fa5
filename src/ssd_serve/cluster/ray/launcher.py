"""The `ray` launcher: the target's ranks and the drafters as Ray actors on one node or on several.

Ray places, starts and ends them, and reports lost ones; tokens and trees pass through the same channels
as between processes of one machine. Knows roles, bundles and addresses; not the meaning of messages.
"""

import secrets
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ssd_serve.base.devices import this_machine
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.errors import EngineDeadError, SettingsError
from ssd_serve.base.logs import Logger
from ssd_serve.base.settings import Settings
from ssd_serve.cluster.health import WorkerDiedError
from ssd_serve.cluster.launch import CONNECT_S, RunningEngine
from ssd_serve.cluster.placement import PinnedModels, resolve_config
from ssd_serve.cluster.process import WorkerPlan
from ssd_serve.cluster.ray.cluster import RayCluster, ray_cluster, warn_of_strangers
from ssd_serve.cluster.ray.placement import STRATEGY, RayPlacement, check_gpus_are_known, ray_place
from ssd_serve.cluster.ray.workers import LONGEST_SILENCE_S, ActorStarter, PingWatch, resolved_addresses
from ssd_serve.cluster.supervisor import Supervisor
from ssd_serve.transport.channel import SocketChannel
from ssd_serve.transport.listener import connect

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
        on_failure: Callable[[WorkerDiedError], None] = lambda _error: None,
        silence_s: float = LONGEST_SILENCE_S,
    ) -> None:
        """`silence_s`: how long an actor may give no sign of life."""
        self._cluster = cluster
        self._key = config.cluster_key or ""
        self._crew = ActorStarter(config, cluster, group, decision, f"ssd-{secrets.token_hex(8)}", log)
        pulses = PingWatch(cluster.ray, lambda: self._crew.workers, silence_s)
        supervisor = Supervisor(
            _plans(decision),
            self._crew.start,
            log,
            on_failure=on_failure,
            pulses=pulses,
        )
        super().__init__(config, decision.placement, supervisor)

    def nodes(self) -> dict[str, str]:
        """Ids of the nodes on which the actors are, by name; of those that run."""
        return {name: worker.node for name, worker in list(self._crew.workers.items()) if worker.node}

    def connect(self, timeout_s: float = CONNECT_S) -> SocketChannel:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            promise = self._crew.addresses
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
        return self.supervisor.over or self._crew.addresses is not promise


@contextmanager
def ray_engine(
    settings: Settings,
    log: Logger,
    *,
    models: PinnedModels | None = None,
    on_failure: Callable[[WorkerDiedError], None] = lambda _error: None,
    place_s: float = _PLACE_S,
    silence_s: float = LONGEST_SILENCE_S,
) -> Generator[RayEngine]:
    """Start an engine for the length of a `with` block, in the cluster that is named or one of its own. For
    `place_s` seconds it waits for devices that others use."""
    with ray_cluster(settings) as cluster:
        warn_of_strangers(cluster.ray, log)
        nodes = cluster.nodes
        check_gpus_are_known(settings, nodes, lambda: this_machine().gpus)
        decision = ray_place(settings, nodes)
        group = cluster.ray.util.placement_group(decision.bundles, strategy=STRATEGY)
        try:
            await_room(group, decision.bundles, place_s, log)
            key = settings.cluster_key or secrets.token_hex(_KEY_BYTES)
            config = resolve_config(settings, decision.placement, models, cluster_key=key)
            engine = RayEngine(config, cluster, decision, group, log, on_failure, silence_s)
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
                f"the Ray cluster has had no free {bundles} for {seconds:.0f} s: others use its devices "
                "(`ray status` shows them)"
            )
        log.warning("waits for devices that others use", wanted=bundles)


def _plans(decision: RayPlacement) -> list[WorkerPlan]:
    names = ["verifier", *(f"rank-{rank}" for rank in range(1, decision.ranks))]
    plans = [WorkerPlan(name, (), vital=True) for name in names]
    return plans + [WorkerPlan(f"drafter-{one}", (), vital=False) for one in range(decision.drafters)]
