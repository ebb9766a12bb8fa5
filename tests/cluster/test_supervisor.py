"""Tests of the supervisor: restarts of workers that die or hang, with longer pauses after each failure."""

import errno
import os
import signal
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from ssd_serve.base.engine_config import EngineConfig, Mode
from ssd_serve.base.messages import Progress
from ssd_serve.base.settings import Settings
from ssd_serve.cluster import health, supervisor
from ssd_serve.cluster.health import HangDetector, HeartbeatReceiver, WorkerDiedError
from ssd_serve.cluster.local import local_engine
from ssd_serve.cluster.process import WorkerPlan, WorkerProcess, start_worker
from ssd_serve.cluster.supervisor import Supervisor
from tests.cluster.dummies import MACHINE, QUIET, alive, beats, workers
from tests.waiting import until

SILENCE_S = 2.5
"""Seconds: longer than a heartbeat is late on a busy machine, and short enough for a test."""


def test_drafter_error_after_a_restart_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_LONG_LIFE_S", 0.5)
    command = workers(verifier="sleep", drafter="refuse late")
    with local_engine(Settings(mode=Mode.SSD), QUIET, machine=MACHINE, command=command) as engine:
        engine.supervisor.target_is_ready()
        until(lambda: engine.supervisor.restarts == 1)
        assert engine.supervisor.failure is None


def test_killed_drafter_is_restarted_alone() -> None:
    command = workers(verifier="sleep", drafter="sleep")
    with local_engine(Settings(mode=Mode.SSD), QUIET, machine=MACHINE, command=command) as engine:
        before = engine.supervisor.pids()
        os.kill(before["drafter-0"], signal.SIGKILL)
        until(lambda: engine.supervisor.restarts == 1 and "drafter-0" in engine.supervisor.pids())
        after = engine.supervisor.pids()
        assert after["verifier"] == before["verifier"]
        assert after["drafter-0"] != before["drafter-0"]
        assert engine.supervisor.failure is None


@pytest.mark.slow
def test_drafter_restarts_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def noted(deaths: int) -> float:
        pauses.append(health.pause_before_restart(deaths))
        return pauses[-1]

    monkeypatch.setattr(supervisor, "pause_before_restart", noted)
    command = workers(verifier="sleep", drafter="crash")
    began = time.monotonic()
    with local_engine(Settings(mode=Mode.SSD), QUIET, machine=MACHINE, command=command) as engine:
        until(lambda: engine.supervisor.restarts >= 3)
        assert time.monotonic() - began > 1.5, "the pauses are waited for"
        assert pauses[:3] == [0.0, 0.5, 1.0]
        assert engine.supervisor.failure is None


class Unheard(HeartbeatReceiver):
    """Test double of a monitor that loses its cluster."""

    def silent(self) -> dict[str, float]:
        raise RuntimeError("the cluster is gone")

    def has_loaded(self, name: str) -> bool:
        return False

    def forget(self, name: str) -> None: ...

    def close(self) -> None: ...


def start(plan: WorkerPlan) -> WorkerProcess:
    return start_worker(plan, EngineConfig())


class Short(Unheard):
    """Test double of a launcher and monitor that runs out of file descriptors for a while."""

    def __init__(self) -> None:
        self.looks = 0
        self.starts = 0

    def silent(self) -> dict[str, float]:
        self.looks += 1
        if self.looks < 5:
            raise OSError(errno.EMFILE, "Too many open files")
        return {}

    def start(self, plan: WorkerPlan) -> WorkerProcess:
        self.starts += 1
        if self.starts in (2, 3):
            raise OSError(errno.EMFILE, "Too many open files")
        return start(plan)


@pytest.mark.slow
def test_worker_is_restarted_after_descriptors_ran_out() -> None:
    plan = WorkerPlan("verifier", tuple(workers(verifier="sleep")("verifier")), vital=True)
    short = Short()
    supervisor = Supervisor([plan], short.start, QUIET, pulses=short)
    supervisor.start()
    supervisor.target_is_ready()
    until(lambda: short.looks > 5)
    first = supervisor.pids()["verifier"]
    os.kill(first, signal.SIGKILL)
    until(lambda: supervisor.pids().get("verifier", first) != first)
    assert (short.starts, supervisor.failure) == (4, None)
    supervisor.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_failed_supervisor_reports_failure_to_waiting_callers() -> None:
    plan = WorkerPlan("verifier", tuple(workers(verifier="sleep")("verifier")), vital=True)
    supervisor = Supervisor([plan], start, QUIET, pulses=Unheard())
    supervisor.start()
    failure = supervisor.await_failure(20.0)
    supervisor.stop()
    assert "not watched any more: RuntimeError: the cluster is gone" in str(failure)
    assert supervisor.over


def test_failure_names_the_process_that_died_first() -> None:
    command = workers(verifier="lose a rank", rank="tell and crash")
    settings = Settings(mode=Mode.AR, tensor_parallel=2)
    with local_engine(settings, QUIET, machine=MACHINE, command=command) as engine:
        until(lambda: engine.supervisor.failure is not None)
        assert str(engine.supervisor.failure).startswith("the rank-1 process was killed by SIGKILL")


@pytest.mark.slow
def test_ready_target_is_restarted_with_all_ranks() -> None:
    command = workers(verifier="listen", rank="sleep", drafter="sleep")
    settings = Settings(mode=Mode.SSD, tensor_parallel=2)
    with local_engine(settings, QUIET, machine=MACHINE, command=command) as engine:
        channel = engine.connect()
        engine.supervisor.target_is_ready()
        for worker in ("verifier", "rank-1"):
            before = engine.supervisor.pids()
            os.kill(before[worker], signal.SIGKILL)
            until(lambda: not channel.receive() and channel.closed)  # noqa: B023
            channel.close()
            channel = engine.connect()
            assert channel.wait(60.0)
            assert isinstance(channel.receive()[0], Progress)
            after = engine.supervisor.pids()
            assert {name for name in after if after[name] != before.get(name)} == {"verifier", "rank-1"}
            assert not alive(before["verifier"])
            assert not alive(before["rank-1"])
            engine.supervisor.target_is_ready()
        assert engine.supervisor.failure is None
        channel.close()


@pytest.mark.slow
def test_target_that_always_dies_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "pause_before_restart", lambda _restarts: 0.0)
    command = workers(verifier="crash")
    with local_engine(Settings(mode=Mode.AR), QUIET, machine=MACHINE, command=command) as engine:
        engine.supervisor.target_is_ready()
        until(lambda: engine.supervisor.failure is not None)
        assert 3 <= engine.supervisor.restarts <= 10
        with pytest.raises(WorkerDiedError, match="verifier process was killed by SIGKILL"):
            engine.connect()


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["verifier", "rank-1", "drafter-0"])
def test_hanging_worker_is_killed_and_restarted(worker: str, tmp_path: Path) -> None:
    command = workers(verifier="sleep", rank="sleep", drafter="sleep")
    settings = Settings(mode=Mode.SSD, tensor_parallel=2, run_dir=tmp_path / "run")
    with local_engine(settings, QUIET, machine=MACHINE, command=command, silence_s=SILENCE_S) as engine:
        before = engine.supervisor.pids()
        until(lambda: all(beats(pid) for pid in before.values()))
        time.sleep(1.0)  # long enough to beat
        engine.supervisor.target_is_ready()
        os.kill(before[worker], signal.SIGSTOP)
        began = time.monotonic()
        lost = 1 if worker == "drafter-0" else 2
        until(lambda: len(set(engine.supervisor.pids().values()) - set(before.values())) == lost)
        assert time.monotonic() - began > SILENCE_S - 1.0
        assert not alive(before[worker])
        assert engine.supervisor.failure is None
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.slow
def test_restarted_drafter_is_watched_once_it_has_loaded() -> None:
    command = workers(verifier="sleep", drafter="load and sleep")
    settings = Settings(mode=Mode.SSD)
    with local_engine(settings, QUIET, machine=MACHINE, command=command, silence_s=SILENCE_S) as engine:
        engine.supervisor.target_is_ready()
        first = engine.supervisor.pids()["drafter-0"]
        os.kill(first, signal.SIGKILL)
        until(lambda: engine.supervisor.pids().get("drafter-0", first) != first)
        second = engine.supervisor.pids()["drafter-0"]
        until(lambda: beats(second))
        time.sleep(1.0)  # long enough to beat
        os.kill(second, signal.SIGSTOP)
        until(lambda: engine.supervisor.pids().get("drafter-0", second) != second)
        assert engine.supervisor.failure is None


@pytest.mark.slow
def test_silent_verifier_is_restarted_unless_it_computes() -> None:
    """Both verifiers are suspected until the one that uses no CPU time is restarted."""
    supervisors: list[Supervisor] = []
    for behaviour in ("sleep", "compute"):
        plan = WorkerPlan("verifier", tuple(workers(verifier=behaviour)("verifier")), vital=True)
        suspicion = HangDetector(look_s=3.0)
        supervisors.append(Supervisor([plan], start, QUIET, suspicion=suspicion))
    idle, busy = supervisors
    for each in supervisors:
        each.start()
        each.target_is_ready()
    until(lambda: psutil.Process(busy.pids()["verifier"]).cpu_times().user > 0.5)  # longer than a start takes

    def is_back() -> bool:
        for each in supervisors:
            each.suspect_verifier(61.0)
        return idle.restarts > 0

    until(is_back)
    assert (busy.restarts, busy.failure, idle.failure) == (0, None, None)
    for each in supervisors:
        each.stop()


@pytest.mark.slow
def test_computing_rank_without_heartbeats_is_not_killed() -> None:
    command = workers(verifier="sleep", rank="compute")
    settings = Settings(mode=Mode.AR, tensor_parallel=2)
    with local_engine(settings, QUIET, machine=MACHINE, command=command, silence_s=SILENCE_S) as engine:
        engine.supervisor.target_is_ready()
        until(lambda: beats(engine.supervisor.pids()["rank-1"]))
        assert engine.supervisor.await_failure(2 * SILENCE_S) is None
        assert engine.supervisor.restarts == 0
