"""A running engine, whoever launched its workers: what callers know of it, and may tell it.

Knows no processes and no actors: its supervisor does, and how to reach the verifier is the launcher's.
"""

from abc import ABC, abstractmethod

from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.cluster.placement import Placement
from ssd_serve.cluster.supervision.exit_reasons import WorkerDiedError
from ssd_serve.cluster.supervision.supervisor import Supervisor
from ssd_serve.transport.channel import SocketChannel

CONNECT_S = 180.0
"""The verifier listens before it loads anything, but importing takes a while on busy cores, or from a disk
that is far away. Who waits is told at once when it died."""


class RunningEngine(ABC):
    """A verifier with its ranks, and its drafters in mode ssd, whose workers `supervisor` looks after.

    `placement`: the decision about modes and devices, as far as `config` does not hold it.
    """

    def __init__(self, config: EngineConfig, placement: Placement, supervisor: Supervisor) -> None:
        self.config = config
        self.placement = placement
        self._supervisor = supervisor

    @abstractmethod
    def connect(self, timeout_s: float = CONNECT_S) -> SocketChannel:
        """The channel to the verifier, once it listens, also after it was started again. Raises the reason
        when there will be none."""

    @abstractmethod
    def close(self) -> None:
        """End all workers."""

    def start(self) -> None:
        """Start the workers; they load their models while this process goes on."""
        self._supervisor.start()

    @property
    def failure(self) -> WorkerDiedError | None:
        """Why nothing can be generated any more, or None."""
        return self._supervisor.failure

    @property
    def restarts(self) -> int:
        """How often a worker was started again."""
        return self._supervisor.restarts

    def await_failure(self, timeout_s: float) -> WorkerDiedError | None:
        """Wait for the reason after a channel has closed; None when there is none in time."""
        return self._supervisor.await_failure(timeout_s)

    def pids(self) -> dict[str, int]:
        """Process ids by name (`verifier`, `rank-1`, `drafter-0`) of those that run, each on its machine."""
        return {name: pid for name, pid in self._supervisor.pids().items() if pid}

    def target_is_ready(self) -> None:
        """The verifier generates: from now on it is started again, with its ranks, when one of them dies."""
        self._supervisor.target_is_ready()

    def deaths_are_explained(self) -> None:
        """The target's last deaths do not count: the request that caused them will not come again."""
        self._supervisor.deaths_are_explained()

    def suspect_verifier(self, silent_s: float) -> None:
        """The verifier has said nothing for so long: it is killed and started again unless it computes."""
        self._supervisor.suspect_verifier(silent_s)

    def expect_end(self) -> None:
        """Say before the channel is closed that the workers' end is meant."""
        self._supervisor.expect_end()
