"""Gives a benchmark's own process what workers are started with. Knows no more than the environment."""

import os
import sys
from pathlib import Path

from ssd_serve.cluster.process import worker_environment

_STARTED_WITH = Path("/proc/self/environ")


def restart_as_worker() -> None:
    """Start this command again with a worker's environment, unless it was started with it.

    malloc reads its variables when a process starts: setting them later changes nothing. Where the system
    does not tell what a process was started with, they are set as far as that helps.
    """
    wanted = worker_environment()
    try:
        started = set(_STARTED_WITH.read_bytes().split(b"\0"))
    except OSError:
        os.environ.update(wanted)
        return
    if any(os.fsencode(f"{name}={value}") not in started for name, value in wanted.items()):
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)
