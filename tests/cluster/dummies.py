"""Dummy worker processes for tests of the launcher and the supervisor."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from ssd_serve.base.devices import Machine
from ssd_serve.base.logs import get_logger

HERE = Path(__file__).parent
QUIET = get_logger("server", level="error")
MACHINE = Machine(tuple(sorted(os.sched_getaffinity(0))), gpus=0)
_BEATING = 3
"""Number of threads of a worker with heartbeats: main, lifeline and heartbeat."""


def workers(**behaviours: str) -> Callable[..., list[str]]:
    """Return commands for dummy workers: `workers(verifier="listen", drafter="crash")`."""

    def command(role: str, *arguments: str) -> list[str]:
        return [sys.executable, str(HERE / "worker_dummy.py"), role, behaviours[role], *arguments]

    return command


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def beats(pid: int) -> bool:
    return bool(psutil.Process(pid).num_threads() >= _BEATING)
