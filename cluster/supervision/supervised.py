"""What every launcher's engine says about itself: it asks its supervisor.

Knows no processes and no actors; how to reach the verifier is the launcher's.
"""

from ssd_serve.cluster.supervision.exit_reasons import WorkerDiedError
from ssd_serve.cluster.supervision.supervisor import Supervisor


class SupervisedEngine:
    """A running engine whose workers `supervisor` looks after."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

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
