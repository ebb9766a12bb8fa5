"""No orphans, whoever is killed first; deaths are noticed, drafters come back, reasons reach the caller."""

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from ssd_serve.cluster.channels.channel import SocketChannel
from ssd_serve.cluster.local.launcher import local_engine
from ssd_serve.cluster.local.process import WorkerPlan, WorkerProcess, start_worker
from ssd_serve.cluster.local.run_dir import make_run_dir
from ssd_serve.cluster.supervision import restart_policy as comeback
from ssd_serve.cluster.supervision import supervisor
from ssd_serve.cluster.supervision.exit_reasons import WorkerDiedError, describe_exit
from ssd_serve.cluster.supervision.supervisor import Supervisor
from ssd_serve.devices import Machine
from ssd_serve.errors import PermissionProblemError, SettingsError
from ssd_serve.logs import get_logger
from ssd_serve.messages import Progress
from ssd_serve.settings import Mode, Settings

HERE = Path(__file__).parent
QUIET = get_logger("server", level="error")
MACHINE = Machine(tuple(sorted(os.sched_getaffinity(0))), gpus=0)


def workers(**behaviours: str) -> Callable[..., list[str]]:
    """Commands for dummy workers: `workers(verifier="listen", drafter="crash")`."""

    def command(role: str, *arguments: str) -> list[str]:
        return [sys.executable, str(HERE / "worker_dummy.py"), role, behaviours[role], *arguments]

    return command


_ALIVE = 3
"""Threads of a worker that beats: its own, its lifeline's and its pulse's."""


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def await_end(channel: SocketChannel) -> None:
    assert until(lambda: not channel.receive() and channel.closed)
    channel.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_parent_leaves_no_orphans(how: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "parent_dummy.py"), str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids: list[int] = list(json.loads(parent.stdout.readline()).values())
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        parent.send_signal(how)
        parent.wait()
        assert until(lambda: not any(alive(pid) for pid in pids))


def test_workers_get_settings_and_titles_and_leave_when_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerProcess, "stop", partialmethod(WorkerProcess.stop, grace_s=30.0))
    settings = Settings(mode=Mode.SSD, target="some-model", draft="d", run_dir=tmp_path / "run")
    command = workers(verifier="listen", drafter="sleep")
    with local_engine(settings, QUIET, machine=MACHINE, command=command) as engine:
        pids = engine.pids()
        channel = engine.connect()
        assert channel.wait(10.0)
        target_device = engine.placement.target
        assert channel.receive() == [Progress(f"target some-model on {target_device}")]
        assert until(lambda: psutil.Process(pids["drafter-0"]).cmdline()[0].startswith("ssd: drafter"))
        began = time.monotonic()
        channel.close()
    assert time.monotonic() - began < 20.0, "they have not left by themselves"
    assert not any(alive(pid) for pid in pids.values())
    assert list((tmp_path / "run").iterdir()) == []


def test_the_verifiers_death_is_reported_with_its_reason() -> None:
    reported: list[WorkerDiedError] = []
    settings = Settings(mode=Mode.AR)
    command = workers(verifier="sleep")
    with local_engine(
        settings, QUIET, machine=MACHINE, command=command, on_failure=reported.append
    ) as engine:
        os.kill(engine.pids()["verifier"], signal.SIGKILL)
        assert until(lambda: engine.failure is not None)
        assert [str(error) for error in reported] == [str(engine.failure)]
    assert "SIGKILL" in str(reported[0])
    assert reported[0].exit_code == 70
    assert not reported[0].explained


@pytest.mark.parametrize("role", ["verifier", "drafter"])
def test_a_refusal_at_the_start_keeps_its_exit_code(role: str, capfd: pytest.CaptureFixture[str]) -> None:
    behaviours = {"verifier": "sleep", "drafter": "sleep", role: "refuse"}
    settings = Settings(mode=Mode.SSD)
    with (
        local_engine(settings, QUIET, machine=MACHINE, command=workers(**behaviours)) as engine,
        pytest.raises(WorkerDiedError) as caught,
    ):
        engine.connect()
    assert caught.value.exit_code == 6
    assert caught.value.explained
    assert "half a checkpoint" in capfd.readouterr().err


def test_a_drafter_that_worked_and_refuses_later_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_LONG_LIFE_S", 0.5)
    command = workers(verifier="sleep", drafter="refuse late")
    with local_engine(Settings(mode=Mode.SSD), QUIET, machine=MACHINE, command=command) as engine:
        engine.target_is_ready()
        assert until(lambda: engine.restarts == 1)
        assert engine.failure is None


def test_a_killed_drafter_comes_back_and_the_verifier_stays() -> None:
    command = workers(verifier="sleep", drafter="sleep")
    with local_engine(Settings(mode=Mode.SSD), QUIET, machine=MACHINE, command=command) as engine:
        before = engine.pids()
        os.kill(before["drafter-0"], signal.SIGKILL)
        assert until(lambda: engine.restarts == 1 and "drafter-0" in engine.pids())
        after = engine.pids()
        assert after["verifier"] == before["verifier"]
        assert after["drafter-0"] != before["drafter-0"]
        assert engine.failure is None


def test_a_signal_to_the_whole_group_is_the_parents_affair() -> None:
    command = workers(verifier="sleep", drafter="sleep")
    with local_engine(Settings(mode=Mode.SSD), QUIET, machine=MACHINE, command=command) as engine:
        pids = engine.pids()
        # At once, while the workers still import, and again when they run.
        for _ in range(2):
            for pid, number in itertools.product(pids.values(), (signal.SIGTERM, signal.SIGINT)):
                os.kill(pid, number)
            time.sleep(1.0)
        assert engine.pids() == pids
        assert (engine.restarts, engine.failure) == (0, None)
        assert all(alive(pid) for pid in pids.values())
    assert not any(alive(pid) for pid in pids.values())


@pytest.mark.slow
def test_a_drafter_that_always_dies_is_restarted_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def noted(deaths: int) -> float:
        pauses.append(comeback.pause_before_restart(deaths))
        return pauses[-1]

    monkeypatch.setattr(supervisor, "pause_before_restart", noted)
    command = workers(verifier="sleep", drafter="crash")
    began = time.monotonic()
    with local_engine(Settings(mode=Mode.SSD), QUIET, machine=MACHINE, command=command) as engine:
        assert until(lambda: engine.restarts >= 3)
        assert time.monotonic() - began > 1.5, "the pauses are waited for"
        assert pauses[:3] == [0.0, 0.5, 1.0]
        assert engine.failure is None


def test_every_rank_but_the_verifiers_is_a_process_and_vital() -> None:
    command = workers(verifier="sleep", rank="sleep")
    settings = Settings(mode=Mode.AR, tensor_parallel=3)
    with local_engine(settings, QUIET, machine=MACHINE, command=command) as engine:
        pids = engine.pids()
        assert set(pids) == {"verifier", "rank-1", "rank-2"}
        os.kill(pids["rank-2"], signal.SIGKILL)
        assert until(lambda: engine.failure is not None)
        assert str(engine.failure).startswith("the rank-2 process was killed by SIGKILL")
        assert engine.failure is not None
        assert engine.failure.exit_code == 70
    assert not any(alive(pid) for pid in pids.values())


class _Broken:
    """A watch that fails when it is asked."""

    def silent(self) -> dict[str, float]:
        raise RuntimeError("the cluster is gone")

    def has_loaded(self, name: str) -> bool:
        return False

    def forget(self, name: str) -> None: ...

    def close(self) -> None: ...


class _Short:
    """Starts workers, but for a while whatever is asked finds no descriptor."""

    def __init__(self) -> None:
        self.looks = 0
        self.starts = 0

    def silent(self) -> dict[str, float]:
        self.looks += 1
        if self.looks < 5:
            raise OSError(errno.EMFILE, "Too many open files")
        return {}

    def has_loaded(self, name: str) -> bool:
        return False

    def forget(self, name: str) -> None: ...

    def close(self) -> None: ...

    def start(self, plan: WorkerPlan, settings: Settings) -> WorkerProcess:
        self.starts += 1
        if self.starts in (2, 3):
            raise OSError(errno.EMFILE, "Too many open files")
        return start_worker(plan, settings)


def test_a_shortage_ends_no_supervision_and_a_worker_is_started_when_it_is_over() -> None:
    plan = WorkerPlan("verifier", tuple(workers(verifier="sleep")("verifier")), vital=True)
    short = _Short()
    supervisor = Supervisor([plan], Settings(mode=Mode.AR), QUIET, pulses=short, starter=short.start)
    supervisor.start()
    supervisor.target_is_ready()
    assert until(lambda: short.looks > 5)
    first = supervisor.pids()["verifier"]
    os.kill(first, signal.SIGKILL)
    assert until(lambda: supervisor.pids().get("verifier", first) != first)
    assert (short.starts, supervisor.failure) == (4, None)
    supervisor.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whoever_waits_hears_that_nobody_is_watched_any_more() -> None:
    plan = WorkerPlan("verifier", tuple(workers(verifier="sleep")("verifier")), vital=True)
    supervisor = Supervisor([plan], Settings(mode=Mode.AR), QUIET, pulses=_Broken())
    supervisor.start()
    failure = supervisor.await_failure(20.0)
    supervisor.stop()
    assert "not watched any more: RuntimeError: the cluster is gone" in str(failure)
    assert supervisor.over


def test_the_process_that_died_first_is_named_not_those_that_lost_it() -> None:
    command = workers(verifier="lose a rank", rank="tell and crash")
    settings = Settings(mode=Mode.AR, tensor_parallel=2)
    with local_engine(settings, QUIET, machine=MACHINE, command=command) as engine:
        assert until(lambda: engine.failure is not None)
        assert str(engine.failure).startswith("the rank-1 process was killed by SIGKILL")


@pytest.mark.slow
def test_a_target_that_was_ready_comes_back_whole() -> None:
    command = workers(verifier="listen", rank="sleep", drafter="sleep")
    settings = Settings(mode=Mode.SSD, tensor_parallel=2)
    with local_engine(settings, QUIET, machine=MACHINE, command=command) as engine:
        channel = engine.connect()
        engine.target_is_ready()
        for victim in ("verifier", "rank-1"):
            before = engine.pids()
            os.kill(before[victim], signal.SIGKILL)
            await_end(channel)
            channel = engine.connect()
            assert channel.wait(10.0)
            assert isinstance(channel.receive()[0], Progress)
            after = engine.pids()
            assert {name for name in after if after[name] != before.get(name)} == {"verifier", "rank-1"}
            assert not alive(before["verifier"])
            assert not alive(before["rank-1"])
            engine.target_is_ready()
        assert engine.failure is None
        channel.close()


@pytest.mark.slow
def test_a_target_that_always_dies_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comeback, "pause_before_restart", lambda _restarts: 0.0)
    command = workers(verifier="crash")
    with local_engine(Settings(mode=Mode.AR), QUIET, machine=MACHINE, command=command) as engine:
        engine.target_is_ready()
        assert until(lambda: engine.failure is not None)
        assert 3 <= engine.restarts <= 10
        with pytest.raises(WorkerDiedError, match="verifier process was killed by SIGKILL"):
            engine.connect()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["verifier", "rank-1", "drafter-0"])
def test_a_worker_that_hangs_is_killed_and_comes_back(victim: str, tmp_path: Path) -> None:
    command = workers(verifier="sleep", rank="sleep", drafter="sleep")
    settings = Settings(mode=Mode.SSD, tensor_parallel=2, run_dir=tmp_path / "run")
    with local_engine(settings, QUIET, machine=MACHINE, command=command) as engine:
        before = engine.pids()
        assert until(lambda: all(psutil.Process(pid).num_threads() >= _ALIVE for pid in before.values()))
        time.sleep(1.0)  # long enough to beat
        engine.target_is_ready()
        os.kill(before[victim], signal.SIGSTOP)
        began = time.monotonic()
        lost = 1 if victim == "drafter-0" else 2
        assert until(lambda: len(set(engine.pids().values()) - set(before.values())) == lost)
        assert time.monotonic() - began > 4.0
        assert not alive(before[victim])
        assert engine.failure is None
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.slow
def test_a_drafter_that_was_just_started_again_may_be_silent_only_until_it_has_loaded() -> None:
    command = workers(verifier="sleep", drafter="load and sleep")
    with local_engine(Settings(mode=Mode.SSD), QUIET, machine=MACHINE, command=command) as engine:
        engine.target_is_ready()
        first = engine.pids()["drafter-0"]
        os.kill(first, signal.SIGKILL)
        assert until(lambda: engine.pids().get("drafter-0", first) != first)
        second = engine.pids()["drafter-0"]
        assert until(lambda: psutil.Process(second).num_threads() >= _ALIVE)
        time.sleep(1.0)  # long enough to beat
        os.kill(second, signal.SIGSTOP)
        assert until(lambda: engine.pids().get("drafter-0", second) != second)
        assert engine.failure is None


@pytest.mark.slow
def test_a_verifier_that_beats_but_says_nothing_comes_back_unless_it_computes() -> None:
    for behaviour, comes_back in (("sleep", True), ("compute", False)):
        command = workers(verifier=behaviour)
        with local_engine(Settings(mode=Mode.AR), QUIET, machine=MACHINE, command=command) as engine:
            engine.target_is_ready()
            before = engine.pids()
            assert until(lambda: psutil.Process(before["verifier"]).num_threads() >= _ALIVE)  # noqa: B023
            ends = time.monotonic() + 6.5
            while time.monotonic() < ends:
                engine.suspect_verifier(61.0)
                time.sleep(0.1)
            assert (engine.pids() != before) == comes_back
            assert engine.failure is None


@pytest.mark.slow
def test_a_rank_that_computes_is_not_taken_for_a_hanging_one() -> None:
    command = workers(verifier="sleep", rank="compute")
    settings = Settings(mode=Mode.AR, tensor_parallel=2)
    with local_engine(settings, QUIET, machine=MACHINE, command=command) as engine:
        engine.target_is_ready()
        assert engine.await_failure(11.0) is None
        assert engine.restarts == 0


def test_exits_are_described() -> None:
    assert describe_exit(6) == "ended with code 6"
    assert describe_exit(-15) == "was killed by SIGTERM"
    assert describe_exit(-200) == "was killed by signal 200"


def test_two_servers_cannot_share_a_run_dir(tmp_path: Path) -> None:
    first = make_run_dir(tmp_path / "run")
    with pytest.raises(SettingsError, match="another server uses"):
        make_run_dir(tmp_path / "run")
    first.remove()
    make_run_dir(tmp_path / "run").remove()
    temporary = make_run_dir(None)
    temporary.remove()
    assert not temporary.path.exists()


def test_an_expected_end_is_no_failure() -> None:
    command = workers(verifier="sleep")
    with local_engine(Settings(mode=Mode.AR), QUIET, machine=MACHINE, command=command) as engine:
        engine.expect_end()
        os.kill(engine.pids()["verifier"], signal.SIGKILL)
        assert engine.await_failure(0.5) is None


def test_a_run_dir_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionProblemError, match="chmod 700"):
        make_run_dir(tmp_path)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(PermissionProblemError, match="SSD_RUN_DIR"):
        make_run_dir(file / "below")
