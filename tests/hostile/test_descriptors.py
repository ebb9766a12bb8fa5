"""Descriptors or threads run out while the engine dies: when they are there again, so is the engine."""

import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.hostile.victim import WISH, Victim, open_victim

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


def answers(victim: Victim, seconds: float) -> bool:
    """Whether it answers again within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            answer = httpx.post(f"{victim.url}/v1/completions", json=WISH, timeout=60.0)
        except httpx.TransportError:
            time.sleep(0.2)
            continue
        if answer.status_code == 200:
            return True
        time.sleep(0.5)
    return False


def kill_target(victim: Victim) -> int:
    """Returns the process id that it had."""
    target: int = victim.workers()["ssd: verifier"].pid
    os.kill(target, signal.SIGKILL)
    return target


@pytest.mark.parametrize("short", ["no-descriptors", "no-threads"])
def test_an_engine_that_dies_in_need_comes_back_afterwards(tmp_path: Path, short: str) -> None:
    mark = tmp_path / "no-descriptors"
    hog = HOG.format(mark=str(mark))
    # On one core: two threads that wait for each other are slow where others compute too.
    with open_victim(tmp_path, before=hog, SSD_MODE="ar", SSD_TARGET_DEVICE="cpu:0") as victim:
        (tmp_path / short).touch()
        time.sleep(0.5)
        killed = kill_target(victim)
        time.sleep(4.0)
        assert victim.process.poll() is None, victim.log
        (tmp_path / short).unlink()
        assert answers(victim, 120.0), victim.log
        assert victim.workers()["ssd: verifier"].pid != killed
        assert "Traceback" not in victim.log
