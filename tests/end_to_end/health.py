"""A server as a process, from the moment when it can generate."""

import subprocess
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

Server = tuple["subprocess.Popen[bytes]", str, Path]
"""The process, its address and its log."""


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, port: int
) -> Generator[Server]:
    """A server that answers at this port, in a session of its own; it is killed in the end."""
    url, log = f"http://127.0.0.1:{port}", folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        await_health(process, url, log)
        yield process, url, log
    finally:
        process.kill()
        process.wait()


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
