"""Supervisor of worker processes: ends those that hang, and restarts those that died.

The target, which is the verifier and its ranks, is restarted as a whole; its final failure is reported once.
Drafters are restarted one by one. Peers notice a death sooner, by their closed channel."""

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ssd_serve.base.errors import EngineDeadError, RankLostError, SsdError, in_a_line
from ssd_serve.base.logs import Logger, RateLimitedLogger
from ssd_serve.cluster.health import (
    ORPHANED,
    USER_ERRORS,
    HangDetector,
    HeartbeatReceiver,
    RestartPolicy,
    WorkerDiedError,
    pause_before_restart,
)
from ssd_serve.cluster.process import StartedWorker, Starter, WorkerPlan

_LOOK_EVERY_S = 0.1
_LONGEST_BUSY_SILENCE_S = 60.0
"""Longest silence of a worker that computes, waits for a disk, or is still loading."""
_LONG_LOOK_S = 1.0
"""Time without processor time after which a worker no longer counts as computing on a busy machine."""
_LONG_LIFE_S = 60.0
"""Lifetime of a worker after which its death counts as a new fault and the back-off restarts."""
_LEFT_BEHIND = (ORPHANED, RankLostError.exit_code)
_LONGEST_START_PAUSE_S = 5.0
"""Longest pause after a failed start: descriptors, memory or processes may be available again."""
_CAUSE_ENDS_S = 10.0
"""Time to wait for the end of the process that caused another one's exit: an interpreter may take seconds."""


@dataclass(slots=True)
class _Watched:
    plan: WorkerPlan
    process: StartedWorker | None
    quick_deaths: int = 0
    failed_starts: int = 0
    due: float = 0.0
    computed_s: float = -1.0
    computed_at: float = -math.inf
    """Time at which processor time was last seen to grow."""
    left_behind_since: float = math.inf
    """Time at which it ended because another process ended: the supervisor waits for that one's exit code."""


class Supervisor:
    """Starts workers from its own thread and monitors them until `stop`."""

    def __init__(
        self,
        plans: Sequence[WorkerPlan],
        starter: Starter,
        log: Logger,
        pulses: HeartbeatReceiver | None = None,
        suspicion: HangDetector | None = None,
    ) -> None:
        """The first of `plans` is the verifier's. `pulses` receives heartbeats: a silent worker is killed.
        `suspicion` judges a verifier that its front end suspects."""
        self._starter = starter
        self._plans = plans
        self._pulses = pulses
        self._log = log
        self._rate_limited = RateLimitedLogger(log)
        self._watched: list[_Watched] = []
        self._started = threading.Event()
        self._stopping = threading.Event()
        self._ending = threading.Event()
        self._start_error: SsdError | None = None
        self._failure: WorkerDiedError | None = None
        self._failed = threading.Event()
        self._restarts = 0
        self._comeback = RestartPolicy()
        self._suspicion = suspicion or HangDetector()
        self._reported_silence_s = 0.0
        # Linux kills workers with the thread that started them: this one lives until `stop`.
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    @property
    def failure(self) -> WorkerDiedError | None:
        """Final failure of the engine, or None."""
        return self._failure

    @property
    def over(self) -> bool:
        """True if no worker will be restarted."""
        return self._failure is not None or self._ending.is_set()

    def target_is_ready(self) -> None:
        """Report that the target generates: from now on it is restarted when it dies."""
        self._comeback.ready()

    def deaths_are_explained(self) -> None:
        """Reset the count of the target's deaths: the request that caused them is not repeated."""
        self._comeback.forgive()

    def suspect_verifier(self, silent_s: float) -> None:
        """Report that the verifier has sent nothing for `silent_s` seconds. Unless it computes, the target is
        killed. Call it repeatedly during the silence, from any thread."""
        self._reported_silence_s = silent_s

    @property
    def restarts(self) -> int:
        """Restarts of all processes so far."""
        return self._restarts

    def await_failure(self, timeout_s: float) -> WorkerDiedError | None:
        """Wait for the failure: after its channel has closed, a process takes time to end."""
        self._failed.wait(timeout_s)
        return self._failure

    def pids(self) -> dict[str, int]:
        """Process ids, each on its machine, of running workers by name (`verifier`, `rank-1`)."""
        running = [(watched.plan.name, watched.process) for watched in self._watched]
        return {name: process.pid for name, process in running if process is not None and process.pid}

    def start(self) -> None:
        """Start all workers; returns when their processes exist."""
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            self.stop()
            raise self._start_error

    def expect_end(self) -> None:
        """Treat the end of workers as intended from now on: no failure, no restart."""
        self._ending.set()

    def stop(self) -> None:
        """Release all workers, kill those that do not end, and end the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            try:
                for plan in self._plans:
                    self._watched.append(_Watched(plan, self._start(plan)))
            except SsdError as error:
                self._start_error = error
            finally:
                self._started.set()
            while not self._stopping.wait(_LOOK_EVERY_S):
                self._watch()
        except Exception as error:  # workers are no longer watched: waiting callers must get the reason
            if not self.over:
                how = f"is not watched any more: {in_a_line(error)}"
                self._fail(WorkerDiedError(self._plans[0].name, EngineDeadError.exit_code, how))
            raise
        finally:
            self._end_all()

    def _watch(self) -> None:
        try:
            self._listen()
            self._doubt()
            for watched in self._watched:
                self._look_at(watched)
        except (OSError, MemoryError) as error:  # the shortage is temporary
            self._rate_limited.warning("workers cannot be watched now", why=in_a_line(error))

    def _start(self, plan: WorkerPlan) -> StartedWorker:
        if self._pulses is not None:
            self._pulses.forget(plan.name)
        process = self._starter(plan)
        self._log.debug("process started", name=plan.name, pid=process.pid)
        return process

    def _listen(self) -> None:
        """Kill a worker without heartbeats: it hangs, and others wait for it."""
        silent = self._pulses.silent() if self._pulses is not None else {}
        for watched in self._watched:
            silent_s = silent.get(watched.plan.name)
            if watched.process is None or silent_s is None or self.over:
                continue
            if silent_s < _LONGEST_BUSY_SILENCE_S and self._has_reason(watched, watched.process):
                continue
            how = f"has sent no heartbeat for {silent_s:.0f} s, and was killed"
            self._kill(watched, watched.process, how)

    def _doubt(self) -> None:
        """Kill a verifier that sends heartbeats, but no tokens and no metrics."""
        silent_s, self._reported_silence_s = self._reported_silence_s, 0.0
        watched = self._watched[0]
        if not silent_s or watched.process is None or self.over:
            return
        if self._suspicion.is_stuck(time.monotonic(), silent_s, watched.process.computed_s):
            self._kill(watched, watched.process, f"has sent nothing for {silent_s:.0f} s, and was killed")

    def _kill(self, watched: _Watched, process: StartedWorker, how: str) -> None:
        process.kill()
        self._lose(watched, process, WorkerDiedError(watched.plan.name, process.stop(), how))

    def _has_reason(self, watched: _Watched, process: StartedWorker) -> bool:
        """True if silence is excused: the worker loads, compiles a kernel or waits for a disk."""
        ready_at, pulses = self._comeback.ready_at, self._pulses
        settled = ready_at is not None and (
            watched.plan.vital
            or ready_at > time.monotonic() - process.age_s
            or (pulses is not None and pulses.has_loaded(watched.plan.name))
        )
        computed_s, now = process.computed_s, time.monotonic()
        if computed_s != watched.computed_s:
            watched.computed_s, watched.computed_at = computed_s, now
        return not settled or now - watched.computed_at < _LONG_LOOK_S or process.waits_for_disk

    def _look_at(self, watched: _Watched) -> None:
        if self.over:
            return
        if watched.process is None:
            if time.monotonic() >= watched.due:
                self._restart(watched)
            return
        code = watched.process.exit_code
        if code is None:
            return
        if code in _LEFT_BEHIND:
            now = time.monotonic()
            watched.left_behind_since = min(watched.left_behind_since, now)
            if now - watched.left_behind_since < _CAUSE_ENDS_S:
                return
        self._lose(watched, watched.process, WorkerDiedError(watched.plan.name, code))

    def _lose(self, watched: _Watched, process: StartedWorker, error: WorkerDiedError) -> None:
        """Handle the end of a process: report it, or schedule a restart."""
        process.release()
        watched.process = None
        if watched.plan.vital:
            self._lose_target(error)
            return
        if self._never_worked(error.worker_code, process):
            self._fail(error)
            return
        if process.age_s >= _LONG_LIFE_S:
            watched.quick_deaths = 0
        pause = pause_before_restart(watched.quick_deaths)
        watched.quick_deaths += 1
        watched.due = time.monotonic() + pause
        self._log.warning("process died", name=watched.plan.name, why=str(error), restart_in_s=pause)
        if pause == 0.0:
            self._restart(watched)

    def _lose_target(self, error: WorkerDiedError) -> None:
        """Handle the end of one process of the target: the others cannot work without it."""
        pause = self._comeback.pause(error.worker_code)
        if pause is None:
            self._fail(error)
            return
        self._log.warning("target died", why=str(error), restart_in_s=pause)
        target = [watched for watched in self._watched if watched.plan.vital]
        left = [watched.process for watched in target if watched.process is not None]
        for process in left:
            process.kill()
        for process in left:
            process.stop()
        for watched in target:
            watched.process = None
            watched.due = time.monotonic() + pause
            watched.left_behind_since = math.inf

    def _never_worked(self, code: int, process: StartedWorker) -> bool:
        """Return True if a drafter ended with a user error at its first start. The engine then fails, so that the
        user sees the error. After that, the server keeps running without the drafter."""
        first = self._restarts == 0 and (self._comeback.ready_at is None or process.age_s < _LONG_LIFE_S)
        return code in USER_ERRORS and first

    def _restart(self, watched: _Watched) -> None:
        self._restarts += 1
        try:
            watched.process = self._start(watched.plan)
            watched.failed_starts = 0
            self._log.info("process restarted", name=watched.plan.name, pid=watched.process.pid)
        except (SsdError, OSError, MemoryError) as error:
            watched.failed_starts += 1
            pause = min(_LONGEST_START_PAUSE_S, pause_before_restart(watched.failed_starts))
            watched.due = time.monotonic() + pause
            self._log.error("process not restarted", name=watched.plan.name, why=str(error))

    def _fail(self, error: WorkerDiedError) -> None:
        if self._failure is None:
            self._failure = error
            self._log.error("engine dead", why=str(error))
            self._failed.set()

    def _end_all(self) -> None:
        running = [watched.process for watched in self._watched if watched.process is not None]
        for process in running:
            process.release()
        for process in running:
            process.stop()
        if self._pulses is not None:
            self._pulses.close()
