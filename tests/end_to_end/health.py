"""Waiting until a server that was started as a process can generate."""

import subprocess
import time
from contextlib import suppress
from pathlib import Path

import httpx


def await_health(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Its log says why it never could."""
    deadline = time.monotonic() + 120
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=30.0).status_code == 200:
                return
        time.sleep(0.05)
