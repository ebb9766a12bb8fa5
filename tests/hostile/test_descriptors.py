"""Descriptors or threads run out while the engine dies: when they are there again, so is the engine."""

import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.hostile.target_server import WISH, TargetServer, start_target_server

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
"""Takes every descriptor of the front end while a file is there, and refuses threads while another one is."""


def answers(server: TargetServer, seconds: float) -> bool:
    """Whether it answers again within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            answer = httpx.post(f"{server.url}/v1/completions", json=WISH, timeout=60.0)
        except httpx.TransportError:
            time.sleep(0.2)
            continue
        if answer.status_code == 200:
            return True
        time.sleep(0.5)
    return False


def kill_target(server: TargetServer) -> int:
    """Returns the process id that it had."""
    target: int = server.workers()["ssd: verifier"].pid
    os.kill(target, signal.SIGKILL)
    return target


@pytest.mark.parametrize("short", ["no-descriptors", "no-threads"])
def test_an_engine_that_dies_in_need_comes_back_afterwards(tmp_path: Path, short: str) -> None:
    mark = tmp_path / "no-descriptors"
    hog = HOG.format(mark=str(mark))
    # On one core: two threads that wait for each other are slow where others compute too.
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
