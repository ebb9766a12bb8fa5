"""SIGTERM while a request runs: the drain, what new requests are told, its end, and how it is cut short."""

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
from tests.servers import await_health, children, free_port, gone

SOME, MANY = 30, 400
"""Tokens that take two seconds, and half a minute: a forward is stretched to 76 ms."""
SHUTTING_DOWN = "the server is shutting down"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "target"
    write_model(folder, seed=1, noise=0.0)
    return folder


@dataclass(frozen=True)
class Streaming:
    """A server that sends a stream, and what is left of the stream."""

    process: "subprocess.Popen[bytes]"
    url: str
    events: Iterator[str]
    workers: list[psutil.Process]

    def told_to_stop(self) -> "Streaming":
        self.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        return self

    def refusals(self) -> list[tuple[int, str, str]]:
        """What a new request and /health are answered: status, code and Retry-After."""
        answers = [
            httpx.post(f"{self.url}/v1/completions", json={"prompt": "a"}, timeout=30.0),
            httpx.get(f"{self.url}/health", timeout=30.0),
        ]
        return [(one.status_code, one.json()["error"]["code"], one.headers["retry-after"]) for one in answers]

    def last_event(self) -> str:
        return [event for event in self.events if event][-1]

    def exit_code(self) -> int:
        """Once nobody is left."""
        code = self.process.wait(20)
        assert gone(self.workers)
        return code


@contextmanager
def streaming(target: Path, tokens: int, drain_seconds: int) -> Generator[Streaming]:
    """A server of this drain, and the rest of a stream whose first token has come."""
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
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    body = {"prompt": "def f(", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    try:
        await_health(url)
        workers = list(children(process).values())
        assert len(workers) == 1
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60.0) as response:
            events = response.iter_lines()
            next(events)
            yield Streaming(process, url, events, workers)
    finally:
        process.kill()
        process.wait()


def test_what_runs_ends_well_while_new_requests_are_refused(target: Path) -> None:
    with streaming(target, SOME, drain_seconds=60) as server:
        began = time.monotonic()
        server.told_to_stop()
        assert server.refusals() == [(503, "shutting_down", "10")] * 2
        assert server.last_event() == "data: [DONE]"
        assert server.exit_code() == 0
        assert time.monotonic() - began < 45, "it waited longer than anything ran"


def test_what_outlasts_the_drain_is_ended_with_an_error(target: Path) -> None:
    with streaming(target, MANY, drain_seconds=2) as server:
        began = time.monotonic()
        server.told_to_stop()
        assert server.refusals() == [(503, "shutting_down", "10")] * 2
        assert SHUTTING_DOWN in server.last_event()
        assert time.monotonic() - began >= 2
        assert server.exit_code() == 0


def test_without_a_drain_nothing_is_waited_for(target: Path) -> None:
    with streaming(target, MANY, drain_seconds=0) as server:
        server.told_to_stop()
        assert SHUTTING_DOWN in server.last_event()
        assert server.exit_code() == 0


def test_a_second_signal_ends_the_drain_at_once(target: Path) -> None:
    with streaming(target, MANY, drain_seconds=600) as server:
        server.told_to_stop()
        time.sleep(1.0)
        assert server.process.poll() is None
        server.told_to_stop()
        assert SHUTTING_DOWN in server.last_event()
        assert server.exit_code() == 0
