"""The servers of the load benchmark: one `ssd serve` for each way to run, started, watched and ended.

Each is a process of its own with its own port, run directory and log. Knows settings and processes, not what
is asked of the servers.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]

from ssd_serve.base.devices import Device
from ssd_serve.base.errors import SsdError
from ssd_serve.base.settings import SECRETS, Settings
from ssd_serve.base.settings_sources import flag_name

_READY_S = 300.0
_LOOK_EVERY_S = 0.2
_LEAVE_S = 15.0
_LAST_LINES = 8


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers. `mode` is what it resolved its mode to, `context` prompt + output in tokens."""

    name: str
    url: str
    mode: str
    context: int
    processes: tuple[psutil.Process, ...]

    def cpu_s(self) -> float:
        """Processor seconds of all its processes so far."""
        total = 0.0
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def memory_mib(self) -> float:
        """Memory of all its processes; shared pages count in proportion where that is known."""
        total = 0
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                memory = process.memory_full_info()
                total += getattr(memory, "pss", memory.rss)
        return round(total / 2**20, 1)


@contextlib.contextmanager
def served(ways: Mapping[str, Settings], folder: Path) -> Generator[dict[str, Server]]:
    """All servers, started one after the other: each measures its step times while the others are idle."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(_server(name, own, folder)) for name, own in ways.items()}


def serve_flags(settings: Settings) -> list[str]:
    """The command line that gives a server these settings. Secrets stay in the environment."""
    flags: list[str] = []
    for name in Settings.model_fields:
        value: object = getattr(settings, name)
        if name in SECRETS or value is None:
            continue
        if isinstance(value, bool):
            flags.append(flag_name(name) if value else flag_name(name).replace("--", "--no-", 1))
        else:
            flags += [flag_name(name), str(value.value if isinstance(value, Enum) else value)]
    return flags


@contextlib.contextmanager
def _server(name: str, settings: Settings, folder: Path) -> Generator[Server]:
    port = _free_port()
    own = settings.model_copy(update={"host": "127.0.0.1", "port": port, "run_dir": folder / f"run-{name}"})
    log = folder / f"{name}.log"
    with log.open("wb") as file:
        command = [sys.executable, "-m", "ssd_serve", "serve", *serve_flags(own)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        yield _await_ready(name, f"http://127.0.0.1:{port}", settings.api_key, process, log)
    finally:
        process.terminate()
        try:
            process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_ready(
    name: str, url: str, api_key: str | None, process: "subprocess.Popen[bytes]", log: Path
) -> Server:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    deadline = time.monotonic() + _READY_S
    with httpx.Client(base_url=url, headers=headers, timeout=30.0, trust_env=False) as http:
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SsdError(f"the server '{name}' did not start:\n{_end_of(log)}")
            with contextlib.suppress(httpx.TransportError):
                health = http.get("/health")
                if health.is_success:
                    break
            time.sleep(_LOOK_EVERY_S)
        context = int(http.get("/v1/models").json()["data"][0]["max_model_len"])
        mode = str(health.json()["mode"])
    own = psutil.Process(process.pid)
    return Server(name, url, mode, context, (own, *own.children(recursive=True)))


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_LAST_LINES:])


def _free_port() -> int:
    """A port that is free now. Should somebody take it before the server does, the server says so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def on_cores(device: Device | None) -> Generator[None]:
    """Bind this process to cores for a while; processes that it starts meanwhile inherit that."""
    if device is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, device.indices)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
