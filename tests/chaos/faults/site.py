"""A running server as the fault benchmark sees it: its processes by name, its health and its counters.

Knows processes and metrics, not what is done to them.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from ssd_serve.base.errors import SsdError
from ssd_serve.bench.load.servers import Server
from ssd_serve.bench.metrics_page import metric
from tests.chaos.processes import by_name

_LOOK_EVERY_S = 0.05
_TOLD_S = 1.5
"""The engine tells its figures once a second."""


class Site:
    """One server with its workers. `folder` is where its run directory is."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.url = server.url
        self.drafter_socket = str(folder / f"run-{server.name}" / "drafter.sock")
        self._own = server.processes[0]
        self._http = httpx.Client(base_url=server.url, timeout=5.0, trust_env=False)

    def pids(self) -> dict[str, int]:
        """Of all processes that are there, by name."""
        return {name: int(process.pid) for name, process in by_name(self._own).items()}

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the process of this name."""
        os.kill(self.pids()[name], number)

    def healthy(self) -> bool:
        """Whether the server says that it can generate."""
        with contextlib.suppress(httpx.HTTPError):
            return self._http.get("/health").is_success
        return False

    def metric(self, name: str) -> float:
        """A counter or gauge; 0 where it is not there."""
        with contextlib.suppress(httpx.HTTPError):
            return metric(self._http.get("/metrics").text, name)
        return 0.0

    def speculates(self) -> bool:
        """Whether a short request finds a draft ready, at least once."""
        before = self.metric("ssd_speculation_cache_hits_total")
        body = {"prompt": "def f(", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
        self._http.post("/v1/completions", json=body, timeout=60.0).raise_for_status()
        time.sleep(_TOLD_S)
        return self.metric("ssd_speculation_cache_hits_total") > before

    def await_whole(self, names: set[str], drafters: float, timeout_s: float = 120.0) -> float:
        """Wait until all these processes are there again, generate, and as many drafters have joined; returns
        since when, as `time.monotonic` tells it."""

        since = 0.0

        def whole() -> bool:
            nonlocal since
            there = names <= self.pids().keys() and self.healthy()
            if not there or self.metric("ssd_drafters_alive") < drafters:
                since = 0.0
            else:
                since = since or time.monotonic()
            # Not yet: a drafter that has just died may still be counted.
            return since > 0 and time.monotonic() - since > _TOLD_S

        self.wait(whole, timeout_s)
        return since

    @staticmethod
    def wait(condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait for a condition. Raises `SsdError` when it does not come true."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise SsdError(f"the server did not recover within {timeout_s:.0f} s")
            time.sleep(_LOOK_EVERY_S)

    def close(self) -> None:
        """Forget the server."""
        self._http.close()
