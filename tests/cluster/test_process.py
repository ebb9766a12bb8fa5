"""Tests of worker processes with doubles, where a real process would take too long to fail."""

import errno
import signal
import subprocess
from typing import Any, cast

import psutil  # type: ignore[import-untyped]
import pytest

from ssd_serve.cluster.process import WorkerProcess


class Held:
    """Test double of a process that is blocked in the kernel: signals have no effect, and it never ends."""

    pid, stdin = 1, None

    def __init__(self) -> None:
        self.kills = 0
        self.waited: list[float | None] = []

    def kill(self) -> None:
        self.kills += 1

    def wait(self, timeout: float | None = None) -> int:
        self.waited.append(timeout)
        raise subprocess.TimeoutExpired("worker", timeout or 0.0)


def test_stop_returns_for_a_process_that_cannot_be_killed() -> None:
    held = Held()
    assert WorkerProcess("verifier", cast(Any, held)).stop(grace_s=0.5) == -signal.SIGKILL
    assert (held.kills, held.waited) == (1, [0.5, 10.0])


def test_process_state_is_unknown_without_a_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find(pid: int) -> None:
        del pid
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(psutil, "Process", find)
    worker = WorkerProcess("verifier", cast(Any, Held()))
    assert (worker.computed_s, worker.waits_for_disk) == (0.0, False)
