"""The drafter process of the installation, joined to an engine in the process of the test."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ssd_serve.base.settings import Settings
from ssd_serve.cluster.local import make_run_dir
from ssd_serve.cluster.process import WorkerPlan, WorkerProcess, start_worker, worker_command
from ssd_serve.transport.listener import Listener
from ssd_serve.verifier.engine import Engine

_JOIN_S = 90.0


@contextmanager
def drafter_process(settings: Settings, engine: Engine, run_dir: Path) -> Generator[WorkerProcess]:
    """It has joined, and is stopped in the end if it is still there."""
    place = make_run_dir(run_dir)
    listener = Listener.unix(place.drafter_socket)
    command = worker_command("drafter", "drafter-0", place.drafter_socket)
    worker = start_worker(WorkerPlan("drafter-0", command), settings.engine_config())
    try:
        deadline = time.monotonic() + _JOIN_S
        while not engine.drafters.num_joined:
            assert worker.exit_code is None
            assert time.monotonic() < deadline
            channel = listener.accept()
            if channel is not None:
                engine.drafters.connect(channel)
            engine.drain()
            time.sleep(0.02)
        yield worker
    finally:
        worker.stop()
        listener.close()
        place.remove()
