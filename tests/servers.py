"""Server processes of tests: a free port, start and readiness, child processes."""

import socket
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]

Server = tuple["subprocess.Popen[bytes]", str, Path]
"""The process, its address and its log."""


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, port: int
) -> Generator[Server]:
    """Start a server in `folder` and in its own session, and kill it in the end."""
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield process, f"http://127.0.0.1:{port}", log
    finally:
        process.kill()
        process.wait()


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, port: int
) -> Generator[Server]:
    """Start a server and wait until it can generate."""
    with started(command, environment, folder, port) as (process, url, log):
        await_health(url, alive=lambda: process.poll() is None, log=log.read_text)
        yield process, url, log


def await_health(
    url: str,
    seconds: float = 120.0,
    alive: Callable[[], bool] = lambda: True,
    log: Callable[[], str] = lambda: "",
) -> set[int]:
    """Wait for 200 from /health, and return all statuses seen."""
    seen: set[int] = set()
    deadline = time.monotonic() + seconds
    # A client without certificates: reading them takes 30 ms of a core that the server needs to start.
    with httpx.Client(base_url=url, timeout=30.0, verify=False) as http:
        while 200 not in seen:
            assert alive(), log()
            assert time.monotonic() < deadline, (seen, log())
            with suppress(httpx.TransportError):
                seen.add(http.get("/health").status_code)
            time.sleep(0.1)
    return seen


def children(process: "subprocess.Popen[bytes]") -> dict[str, psutil.Process]:
    """Return child processes by title, such as `ssd: verifier`."""
    found: dict[str, psutil.Process] = {}
    for child in psutil.Process(process.pid).children():
        # A process that was just killed has no command line.
        with suppress(psutil.Error, IndexError):
            found[child.cmdline()[0].strip()] = child
    return found


def gone(processes: Sequence[psutil.Process]) -> bool:
    """True if all processes end within 60 s."""
    return not psutil.wait_procs(processes, timeout=60.0)[1]


def complete(url: str, tokens: int = 24) -> str:
    """Send one request and return its text."""
    body = {"prompt": "def f(", "max_tokens": tokens, "seed": 3, "temperature": 0.8}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text
