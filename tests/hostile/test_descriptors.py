"""Tests of a server without free descriptors or threads: idle connections, and an engine that dies meanwhile."""

import contextlib
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.hostile.target_server import REQUEST, TargetServer, start_target_server

FEW_DESCRIPTORS = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))"
HOG = """
import os, pathlib, resource, threading, time
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
start, mark = threading.Thread.start, pathlib.Path({mark!r})
def refuse(thread):
    if mark.with_name("no-threads").exists() and thread.name == "reconnect":
        raise RuntimeError("can't start new thread")
    start(thread)
def hog():
    held = []
    while True:
        try:
            while mark.exists():
                held.append(os.dup(0))
        except OSError:
            pass
        if not mark.exists():
            while held:
                os.close(held.pop())
        time.sleep(0.02)
threading.Thread.start = refuse
threading.Thread(target=hog, daemon=True).start()
"""
"""Takes all descriptors of the front end while a file exists, and refuses threads while another one does."""


def answers(server: TargetServer, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            answer = httpx.post(f"{server.url}/v1/completions", json=REQUEST, timeout=60.0)
        except httpx.TransportError:
            time.sleep(0.2)
            continue
        if answer.status_code == 200:
            return True
        time.sleep(0.5)
    return False


def kill_target(server: TargetServer) -> int:
    """Kill the target, and return its process id."""
    target: int = server.workers()["ssd: verifier"].pid
    os.kill(target, signal.SIGKILL)
    return target


@pytest.mark.parametrize("short", ["no-descriptors", "no-threads"])
def test_engine_restarts_after_descriptors_or_threads_ran_out(tmp_path: Path, short: str) -> None:
    mark = tmp_path / "no-descriptors"
    hog = HOG.format(mark=str(mark))
    # On one core: two threads that wait for each other are slow on shared cores.
    with start_target_server(tmp_path, before=hog, SSD_MODE="ar", SSD_TARGET_DEVICE="cpu:0") as server:
        (tmp_path / short).touch()
        time.sleep(0.5)
        killed = kill_target(server)
        time.sleep(4.0)
        assert server.process.poll() is None, server.log
        (tmp_path / short).unlink()
        assert answers(server, 120.0), server.log
        assert server.workers()["ssd: verifier"].pid != killed
        assert "Traceback" not in server.log


def test_more_idle_connections_than_descriptors_block_no_one_else(tmp_path: Path) -> None:
    """There are 1.5 times as many connections as descriptors of the process."""
    with start_target_server(tmp_path, before=FEW_DESCRIPTORS) as server:
        assert "limit=256" in server.log
        with server.unharmed(), contextlib.ExitStack() as stack:
            for _ in range(8):
                for _ in range(48):
                    stack.enter_context(server.connect())
                assert httpx.get(f"{server.url}/health", timeout=30.0).status_code == 200
                assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200
        assert "out of system resource" not in server.log
