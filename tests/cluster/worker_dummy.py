"""A worker that computes nothing: `behaviour` comes from its arguments. Run as a script by tests."""

import os
import signal
import sys
import time
from pathlib import Path

from ssd_serve.base.errors import CheckpointError, RankLostError
from ssd_serve.base.messages import Progress
from ssd_serve.cluster.worker import enter_worker, leave_worker
from ssd_serve.transport.listener import Listener


def main(role: str, behaviour: str, *arguments: str) -> int:
    settings, on_loaded = enter_worker(
        f"rank-{arguments[0]}" if role == "rank" else arguments[0] if role == "drafter" else role
    )
    if behaviour == "refuse":
        return leave_worker(role, CheckpointError(f"the folder {settings.target} is half a checkpoint"))
    if behaviour == "refuse late":
        time.sleep(1.0)
        return leave_worker(role, CheckpointError("the checkpoint is gone"))
    if behaviour == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "tell and crash":
        Path(arguments[-1], "crashed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "lose a rank":
        while not Path(arguments[-1], "crashed").exists():
            time.sleep(0.001)
        return leave_worker(role, RankLostError("another rank is gone"))
    if behaviour == "compute":
        time.sleep(0.2)  # long enough for a first sign of life
        sys.setswitchinterval(1000.0)  # no other thread has a turn, as in a compiler that holds the lock
        ends = time.monotonic() + 9.0
        while time.monotonic() < ends:
            pass
        sys.setswitchinterval(0.005)
    if behaviour == "load and sleep":
        on_loaded()
    if behaviour == "listen":
        listener = Listener.unix(arguments[0])
        listener.wait(60.0)
        channel = listener.accept()
        listener.close()
        assert channel is not None
        channel.send(Progress(f"target {settings.target} on {settings.target_device}"))
    time.sleep(120)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
