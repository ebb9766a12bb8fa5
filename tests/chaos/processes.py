"""A real server under test: its processes by title, its health, its counters and what its processes hold."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]

from ssd_serve.base.errors import SsdError
from ssd_serve.base.settings import SECRETS, Settings
from ssd_serve.base.settings_sources import flag_name
from ssd_serve.bench.serve import metric
from tests.servers import free_port, running

_TITLE = "ssd: "
_POLL_S = 0.05
METRICS_DELAY_S = 1.5
"""The engine updates its metrics once a second."""
_KILL_SHARE: Mapping[str, float] = {"drafter": 0.5, "verifier": 0.2}
"""Share of disturbances that kill a process, by role; the others stall it."""


def serve_flags(settings: Settings) -> list[str]:
    """Return the flags that give a server these settings; secrets stay in the environment."""
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


class RunningServer:
    """A server's processes by name, its health and its metrics."""

    def __init__(self, url: str, process: psutil.Process, folder: Path) -> None:
        self.url = url
        self.process = process
        self.run_dir = folder / "run"
        self.http = httpx.Client(base_url=url, timeout=5.0, trust_env=False)

    def processes(self) -> dict[str, psutil.Process]:
        """Return the living processes: `server`, `verifier`, `drafter-0`, `rank-1`."""
        found: dict[str, psutil.Process] = {"server": self.process}
        with contextlib.suppress(psutil.Error):
            for child in self.process.children(recursive=True):
                with contextlib.suppress(psutil.Error, IndexError):
                    title = str(child.cmdline()[0]).strip()
                    if title.startswith(_TITLE):  # a process that has just started has no title yet
                        found[title.removeprefix(_TITLE)] = child
        return found

    def pids(self) -> dict[str, int]:
        return {name: int(process.pid) for name, process in self.processes().items()}

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pids()[name], number)

    def healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return self.http.get("/health").is_success
        return False

    def metric(self, name: str) -> float:
        """Return a counter or gauge; 0 if the page lacks it or does not answer."""
        with contextlib.suppress(httpx.HTTPError):
            return metric(self.http.get("/metrics").text, name)
        return 0.0

    def speculates(self) -> bool:
        """Return True if a short request finds a draft ready at least once."""
        before = self.metric("ssd_speculation_cache_hits_total")
        body = {"prompt": "def f(", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
        self.http.post("/v1/completions", json=body, timeout=60.0).raise_for_status()
        time.sleep(METRICS_DELAY_S)
        return self.metric("ssd_speculation_cache_hits_total") > before

    def await_recovery(self, names: set[str], drafters: float, timeout_s: float = 120.0) -> float:
        """Wait until these processes exist, the server is healthy, and as many drafters have joined.

        Returns the time since when that holds, of `time.monotonic`.
        """
        since = 0.0

        def recovered() -> bool:
            nonlocal since
            there = names <= self.pids().keys() and self.healthy()
            since = (
                0.0
                if not there or self.metric("ssd_drafters_alive") < drafters
                else since or time.monotonic()
            )
            # A drafter that has just died may still be counted.
            return since > 0 and time.monotonic() - since > METRICS_DELAY_S

        self.wait(recovered, timeout_s)
        return since

    @staticmethod
    def wait(condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait for a condition. Raises `SsdError` after the timeout."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise SsdError(f"the server did not recover within {timeout_s:.0f} s")
            time.sleep(_POLL_S)


@contextlib.contextmanager
def served(settings: Settings, folder: Path) -> Generator[RunningServer]:
    """Start a server with these settings and end it."""
    port = free_port()
    own = settings.model_copy(update={"host": "127.0.0.1", "port": port, "run_dir": folder / "run"})
    command = [sys.executable, "-m", "ssd_serve", "serve", *serve_flags(own)]
    with running(command, os.environ, folder, port) as (process, url, _):
        server = RunningServer(url, psutil.Process(process.pid), folder)
        try:
            yield server
        finally:
            server.http.close()
            if process.poll() is None:
                with contextlib.suppress(psutil.Error):
                    psutil.Process(process.pid).send_signal(signal.SIGCONT)


def stop(server: RunningServer, timeout_s: float = 60.0) -> int | None:
    """Send SIGTERM and return the exit code; None if the server does not end."""
    try:
        server.process.terminate()
        code: int | None = server.process.wait(timeout_s)
    except (psutil.Error, subprocess.TimeoutExpired):
        return None
    return code


@dataclass(slots=True)
class Series:
    """Samples of one process: seconds, memory (proportional or resident set, MiB) and open descriptors."""

    name: str
    pid: int
    seconds: list[float] = field(default_factory=list[float])
    memory_mib: list[float] = field(default_factory=list[float])
    descriptors: list[int] = field(default_factory=list[int])


class ProcessMonitor:
    """Samples of a server's processes; a restarted process has its own series."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._began = time.monotonic()
        self._seen: dict[int, psutil.Process] = {}
        self.series: dict[int, Series] = {}

    def sample(self) -> None:
        """Sample every living process."""
        for name, process in self._server.processes().items():
            with contextlib.suppress(psutil.Error):
                self._seen[process.pid] = process
                series = self.series.setdefault(process.pid, Series(name, process.pid))
                memory, descriptors = process.memory_full_info(), process.num_fds()
                series.seconds.append(time.monotonic() - self._began)
                series.memory_mib.append(getattr(memory, "pss", memory.rss) / 2**20)
                series.descriptors.append(descriptors)

    def orphans(self, timeout_s: float = 10.0) -> list[str]:
        """Return the processes that live although their server has ended."""
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=timeout_s)
        return [f"{self.series[each.pid].name} {each.pid}" for each in alive]


class Disturber:
    """Kills and stalls processes at random; first it kills one process of each role in `kills`."""

    def __init__(self, server: RunningServer, kills: tuple[str, ...], source: random.Random) -> None:
        self._server = server
        self._kills = kills
        self._owed = list(kills)
        self._source = source
        self.done: dict[str, int] = {}

    def disturb(self, may_kill: bool, sleep: Callable[[float], None] = time.sleep) -> None:
        """Kill or stall one process."""
        workers = {name: each for name, each in self._server.processes().items() if name != "server"}
        if not workers:
            return
        owed = [name for name in workers if name.partition("-")[0] in self._owed]
        name = owed[0] if owed else self._source.choice(sorted(workers))
        role, process = name.partition("-")[0], workers[name]
        share = _KILL_SHARE.get(role, 0.0) if role in self._kills else 0.0
        kill = bool(owed) or (may_kill and self._source.random() < share)
        with contextlib.suppress(psutil.Error):
            if kill:
                process.kill()
            else:
                process.send_signal(signal.SIGSTOP)
                sleep(self._source.uniform(0.2, 1.5))
                process.send_signal(signal.SIGCONT)
        if owed:
            self._owed.remove(role)
        what = f"{'killed' if kill else 'stalled'} {role}"
        self.done[what] = self.done.get(what, 0) + 1
