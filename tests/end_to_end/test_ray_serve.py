"""Tests of `ssd serve --launcher ray`: answers, and no processes or files after its end."""

import os
import signal
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from ssd_serve.bench.serve import metric
from tests.chaos.ray_nodes import two_nodes
from tests.end_to_end.tiny_pair import write_pair
from tests.servers import Server, free_port, running

RAYS_AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}


@pytest.fixture
def temporary() -> Generator[Path]:
    """Yield a folder with a short path, as needed for sockets."""
    with tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def serving(folder: Path, temporary: Path, *flags: str) -> Generator[Server]:
    """Start a server; its files and those of Ray are below `temporary`."""
    target, draft = (str(model) for model in write_pair(folder / "pair"))
    port = free_port()
    command = [sys.executable, "-m", "ssd_serve", "serve", target, "--draft", draft, "--port", str(port)]
    command += ["--mode", "ssd", "--dtype", "fp32", "--kv-memory-mb", "64", *flags]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with running(command, environment, folder, port) as server:
        yield server


# SIGTERM: tests/deploy/test_split.py.
@pytest.mark.parametrize("how", ["Ctrl-C", "SIGKILL"])
def test_server_on_ray_answers_and_leaves_no_processes(tmp_path: Path, temporary: Path, how: str) -> None:
    with serving(tmp_path, temporary, "--launcher", "ray") as (process, url, log):
        body = {"prompt": "def f(", "max_tokens": 16, "seed": 3}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0)
        assert answer.json()["usage"]["completion_tokens"] == 16, answer.text
        started = psutil.Process(process.pid).children(recursive=True)
        assert any("raylet" in child.name() for child in started)
        if how == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.kill()
        code = process.wait(60)
        assert code == {"Ctrl-C": 0, "SIGKILL": -9}[how], log.read_text()
        left = psutil.wait_procs(started, timeout=10.0 if how == "SIGKILL" else 30.0)[1]
        # Agents of Ray search for their node for some minutes if they get no message to end.
        assert {process.name() for process in left} <= (RAYS_AGENTS if how == "SIGKILL" else set())
        for process in left:
            process.kill()
        if how != "SIGKILL":
            assert "Traceback" not in log.read_text()
            assert list(temporary.iterdir()) == []


def test_server_joins_a_running_cluster(tmp_path: Path, temporary: Path) -> None:
    with two_nodes() as (address, _), patch.dict(os.environ, {"RAY_ADDRESS": address}):
        devices = ("--target-device", "cpu:0", "--draft-device", "cpu:1")
        for start in ("first", "second"):  # the second one needs all resources of the first one
            (tmp_path / start).mkdir()
            with serving(tmp_path / start, temporary, *devices) as (process, url, log):
                body = {"prompt": "def f(", "max_tokens": 16, "seed": 3}
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0)
                assert answer.json()["usage"]["completion_tokens"] == 16, answer.text
                assert metric(httpx.get(f"{url}/metrics").text, "ssd_drafters_alive") == 1
                workers = actors()
                assert len(workers) == 2
                assert not set(workers) & set(psutil.Process(process.pid).children(recursive=True))
                process.terminate()
                assert process.wait(60) == 0, log.read_text()
            assert psutil.wait_procs(workers, timeout=30.0)[1] == []


def actors() -> list[psutil.Process]:
    """Return the processes of verifiers and drafters on Ray nodes that this process has started."""
    children = psutil.Process().children(recursive=True)
    return [each for each in children if "RoleActor" in " ".join(each.cmdline())]
