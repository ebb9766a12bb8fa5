"""Tests of the launcher: no orphans, reported reasons of failures, and the end of all processes."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from functools import partialmethod
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from ssd_serve.base.engine_config import Mode
from ssd_serve.base.errors import PermissionProblemError, SettingsError
from ssd_serve.base.messages import Progress
from ssd_serve.base.settings import Settings
from ssd_serve.cluster.health import WorkerDiedError, describe_exit
from ssd_serve.cluster.local import local_engine, make_run_dir
from ssd_serve.cluster.process import WorkerProcess
from tests.cluster.dummies import HERE, MACHINE, QUIET, alive, workers
from tests.waiting import until


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_killed_parent_leaves_no_orphans(how: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "parent_dummy.py"), str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids: list[int] = list(json.loads(parent.stdout.readline()).values())
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        parent.send_signal(how)
        parent.wait()
        until(lambda: not any(alive(pid) for pid in pids))


def test_workers_get_settings_and_exit_with_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerProcess, "stop", partialmethod(WorkerProcess.stop, grace_s=30.0))
    settings = Settings(mode=Mode.SSD, target="some-model", draft="d", run_dir=tmp_path / "run")
    command = workers(verifier="listen", drafter="sleep")
    with local_engine(settings, QUIET, machine=MACHINE, command=command) as engine:
        pids = engine.supervisor.pids()
        channel = engine.connect()
        assert channel.wait(60.0)
        target_device = engine.placement.target
        assert channel.receive() == [Progress(f"target some-model on {target_device}")]
        until(lambda: psutil.Process(pids["drafter-0"]).cmdline()[0].startswith("ssd: drafter"))
        began = time.monotonic()
        channel.close()
    assert time.monotonic() - began < 20.0, "they have not left by themselves"
    assert not any(alive(pid) for pid in pids.values())
    assert list((tmp_path / "run").iterdir()) == []


def test_death_of_the_verifier_is_reported_with_its_reason() -> None:
    with local_engine(
        Settings(mode=Mode.AR), QUIET, machine=MACHINE, command=workers(verifier="sleep")
    ) as engine:
        os.kill(engine.supervisor.pids()["verifier"], signal.SIGKILL)
        failure = engine.supervisor.await_failure(20.0)
    assert failure is not None
    assert "SIGKILL" in str(failure)
    assert (failure.exit_code, failure.explained) == (70, False)


@pytest.mark.parametrize("role", ["verifier", "drafter"])
def test_error_at_start_keeps_its_exit_code(role: str, capfd: pytest.CaptureFixture[str]) -> None:
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


def test_workers_ignore_signals_to_the_process_group() -> None:
    command = workers(verifier="sleep", drafter="sleep")
    with local_engine(Settings(mode=Mode.SSD), QUIET, machine=MACHINE, command=command) as engine:
        pids = engine.supervisor.pids()
        # At once, while the workers still import, and again when they run.
        for _ in range(2):
            for pid, number in itertools.product(pids.values(), (signal.SIGTERM, signal.SIGINT)):
                os.kill(pid, number)
            time.sleep(1.0)
        assert engine.supervisor.pids() == pids
        assert (engine.supervisor.restarts, engine.supervisor.failure) == (0, None)
        assert all(alive(pid) for pid in pids.values())
    assert not any(alive(pid) for pid in pids.values())


def test_ranks_are_vital_processes() -> None:
    command = workers(verifier="sleep", rank="sleep")
    settings = Settings(mode=Mode.AR, tensor_parallel=3)
    with local_engine(settings, QUIET, machine=MACHINE, command=command) as engine:
        pids = engine.supervisor.pids()
        assert set(pids) == {"verifier", "rank-1", "rank-2"}
        os.kill(pids["rank-2"], signal.SIGKILL)
        until(lambda: engine.supervisor.failure is not None)
        assert str(engine.supervisor.failure).startswith("the rank-2 process was killed by SIGKILL")
        assert engine.supervisor.failure is not None
        assert engine.supervisor.failure.exit_code == 70
    assert not any(alive(pid) for pid in pids.values())


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


def test_expected_end_is_no_failure() -> None:
    command = workers(verifier="sleep")
    with local_engine(Settings(mode=Mode.AR), QUIET, machine=MACHINE, command=command) as engine:
        engine.supervisor.expect_end()
        os.kill(engine.supervisor.pids()["verifier"], signal.SIGKILL)
        assert engine.supervisor.await_failure(0.5) is None


def test_run_dir_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionProblemError, match="chmod 700"):
        make_run_dir(tmp_path)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(PermissionProblemError, match="SSD_RUN_DIR"):
        make_run_dir(file / "below")
