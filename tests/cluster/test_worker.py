"""The last words of a worker process."""

import subprocess
import sys
import time

import pytest

ENDING_SLOWLY = """
import atexit, sys, time
from ssd_serve.base import errors
from ssd_serve.cluster.worker import leave_worker
atexit.register(time.sleep, float(sys.argv[2]))
sys.exit(leave_worker("rank-1", getattr(errors, sys.argv[1])("it is gone")))
"""


@pytest.mark.parametrize(
    ("error", "code", "teardown_s"),
    # The driver of a GPU that hangs waits for it, longer than anybody should wait for this process.
    [("RankLostError", 70, 0.0), ("DeviceHangError", 72, 60.0)],
)
def test_worker_reports_its_error_and_exits_despite_a_hanging_gpu(
    error: str, code: int, teardown_s: float
) -> None:
    started = time.monotonic()
    command = [sys.executable, "-c", ENDING_SLOWLY, error, str(teardown_s)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
    assert (done.returncode, done.stderr) == (code, "ssd: rank-1: it is gone\n")
    assert time.monotonic() - started < 30.0
