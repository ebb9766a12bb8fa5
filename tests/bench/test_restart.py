"""A benchmark's process starts again as a worker's would, once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ssd_serve.cluster.process import worker_environment

SCRIPT = """
import os, sys
from ssd_serve.bench.restart import restart_as_worker
restart_as_worker()
print(os.getpid(), sys.argv[1:], os.environ["MALLOC_TRIM_THRESHOLD_"])
restart_as_worker()
print("torch" in sys.modules)
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize("already", [False, True])
def test_a_process_restarts_once_with_its_arguments(already: bool) -> None:
    names = set(worker_environment()) - set(os.environ)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environment = worker_environment() if already else plain
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "one", "two"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = done.stdout.splitlines()
    assert "['one', 'two']" in first
    assert first.endswith(worker_environment()["MALLOC_TRIM_THRESHOLD_"])
    assert second == "False", "restarting must come before what is slow to import"
    assert all(name not in os.environ for name in names), "the tests' own process stays as it is"
