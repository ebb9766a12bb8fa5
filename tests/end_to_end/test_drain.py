"""SIGTERM while a request runs: the drain, answers to new requests, its end, and a second signal."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from ssd_serve.bench.emulated import emulating
from tests.end_to_end.tiny_pair import write_model
from tests.servers import children, free_port, gone, running

SOME, MANY = 30, 400
"""Tokens for two seconds and for half a minute, with forwards of 76 ms."""
SHUTTING_DOWN = "the server is shutting down"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "target"
    write_model(folder, seed=1, noise=0.0)
    return folder


@dataclass(frozen=True)
class Streaming:
    """A server that sends a stream, and the rest of the stream."""

    process: "subprocess.Popen[bytes]"
    url: str
    events: Iterator[str]
    workers: list[psutil.Process]

    def send_sigterm(self) -> "Streaming":
        self.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        return self

    def refusals(self) -> list[tuple[int, str, str]]:
        """Return status, code and Retry-After of a new request and of /health."""
        answers = [
            httpx.post(f"{self.url}/v1/completions", json={"prompt": "a"}, timeout=30.0),
            httpx.get(f"{self.url}/health", timeout=30.0),
        ]
        return [(one.status_code, one.json()["error"]["code"], one.headers["retry-after"]) for one in answers]

    def last_event(self) -> str:
        return [event for event in self.events if event][-1]

    def exit_code(self) -> int:
        """Wait for the end of all processes."""
        code = self.process.wait(60)
        assert gone(self.workers)
        return code


@contextmanager
def streaming(target: Path, folder: Path, tokens: int, drain_seconds: int) -> Generator[Streaming]:
    """Start a server and a stream, and yield after the first token."""
    port = free_port()
    environment = {
        **os.environ,
        "SSD_TARGET": str(target),
        "SSD_MODE": "ar",
        "SSD_MODEL_WRAPPER": emulating("mi300x-70b-1b*4"),
        "SSD_PORT": str(port),
        "SSD_DTYPE": "fp32",
        "SSD_DRAIN_SECONDS": str(drain_seconds),
    }
    command = [sys.executable, "-m", "ssd_serve", "serve"]
    body = {"prompt": "def f(", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    with running(command, environment, folder, port) as (process, url, _):
        workers = list(children(process).values())
        assert len(workers) == 1
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60.0) as response:
            events = response.iter_lines()
            next(events)
            yield Streaming(process, url, events, workers)


def test_drain_finishes_running_requests_and_refuses_new_ones(target: Path, tmp_path: Path) -> None:
    with streaming(target, tmp_path, SOME, drain_seconds=60) as server:
        began = time.monotonic()
        server.send_sigterm()
        assert server.refusals() == [(503, "shutting_down", "10")] * 2
        assert server.last_event() == "data: [DONE]"
        assert server.exit_code() == 0
        assert time.monotonic() - began < 45, "it waited longer than anything ran"


def test_requests_longer_than_the_drain_end_with_an_error(target: Path, tmp_path: Path) -> None:
    with streaming(target, tmp_path, MANY, drain_seconds=2) as server:
        began = time.monotonic()
        server.send_sigterm()
        assert server.refusals() == [(503, "shutting_down", "10")] * 2
        assert SHUTTING_DOWN in server.last_event()
        assert time.monotonic() - began >= 2
        assert server.exit_code() == 0


def test_zero_drain_seconds_ends_requests_at_once(target: Path, tmp_path: Path) -> None:
    with streaming(target, tmp_path, MANY, drain_seconds=0) as server:
        server.send_sigterm()
        assert SHUTTING_DOWN in server.last_event()
        assert server.exit_code() == 0


def test_second_signal_ends_the_drain(target: Path, tmp_path: Path) -> None:
    with streaming(target, tmp_path, MANY, drain_seconds=600) as server:
        server.send_sigterm()
        time.sleep(1.0)
        assert server.process.poll() is None
        server.send_sigterm()
        assert SHUTTING_DOWN in server.last_event()
        assert server.exit_code() == 0
