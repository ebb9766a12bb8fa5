"""Running one engine: started, asked, and ended with all its children.

Knows processes and what each engine needs to be asked with, not what is measured.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from ssd_serve.bench.peers.builds import log_of
from ssd_serve.bench.peers.client import (
    Ask,
    PeerError,
    Sample,
    body,
    draft_counters,
    get,
    read_answer,
    stream,
)
from ssd_serve.bench.peers.ways import LLAMA, OURS, TRANSFORMERS, Place, Way, command, variables
from ssd_serve.cluster.process import worker_environment

_START_S, _STOP_S = 300.0, 15.0
_LOOK_EVERY_S = 0.2
_LOG_TAIL = 600
_WHOLE_DISTRIBUTION: dict[str, object] = {"cache_prompt": False, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""llama.cpp truncates the distribution unless told otherwise."""

Answer = TypeVar("Answer")
Words = Callable[[Way, Place, int], list[str]]
"""What starts a way, at a port."""


class Engine(Protocol):
    """A running engine."""

    @property
    def version(self) -> str:
        """What it says about itself."""
        ...

    def ask(self, way: Way, ask: Ask, /) -> Sample:
        """One request in this way, alone on the engine."""
        ...

    def page(self) -> str:
        """Its page of metrics; empty where it has none."""
        ...


class Served:
    """An engine behind an OpenAI endpoint on loopback. `counters`: vLLM's page of totals."""

    def __init__(
        self,
        port: int,
        version: str,
        extra: Mapping[str, object],
        counters: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self.version = version
        self._port = port
        self._extra = extra
        self._counters = counters

    def page(self) -> str:
        return get(self._port, "/metrics")[1]

    def ask(self, _way: Way, ask: Ask) -> Sample:
        """Stream one completion. A server has one way."""
        before = self._counters() if self._counters else (0, 0)
        sample = read_answer(stream(self._port, body(ask, self._extra)), ask)
        if self._counters is None:
            return sample
        drafted, accepted = (now - then for now, then in zip(self._counters(), before, strict=True))
        return replace(sample, drafted=drafted, accepted=accepted)


class _Hello(msgspec.Struct):
    version: str
    torch: str


class _Steps(msgspec.Struct):
    counts: list[int]
    seconds: list[float]
    drafted: int
    text: tuple[int, ...] = ()


class Scripted:
    """The transformers worker behind its standard streams."""

    def __init__(self, process: "subprocess.Popen[bytes]", cores: int) -> None:
        self._process = process
        self._cores = cores
        hello = _decoded(_line(process), _Hello)
        self.version = f"{hello.version}, torch {hello.torch}"

    def page(self) -> str:
        return ""

    def ask(self, way: Way, ask: Ask) -> Sample:
        """Send one line, read one line."""
        line: dict[str, object] = {
            "prompt": list(ask.prompt),
            "tokens": ask.tokens,
            "temperature": ask.temperature,
            "seed": ask.seed,
            "threads": way.cores or self._cores,
            "length": way.length,
            "threshold": way.threshold,
            "match": way.match,
        }
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # its end is noticed below
                self._process.stdin.write(json.dumps(line).encode() + b"\n")
                self._process.stdin.flush()
        return read_steps(_line(self._process), ask)


def read_steps(line: bytes, ask: Ask) -> Sample:
    """A sample from the worker's line. Every step commits one token of the target's own."""
    steps = _decoded(line, _Steps)
    if len(steps.counts) < 2 or steps.counts[-1] != ask.tokens:
        raise PeerError(f"the answer has {(steps.counts or [0])[-1]} tokens instead of {ask.tokens}")
    return Sample(
        tokens=ask.tokens,
        counted=ask.tokens - steps.counts[0],
        first_s=steps.seconds[0],
        decode_s=steps.seconds[-1] - steps.seconds[0],
        drafted=steps.drafted,
        accepted=ask.tokens - len(steps.counts) if steps.drafted else 0,
        ids=steps.text,
    )


@contextlib.contextmanager
def launched(way: Way, place: Place, words: Words = command) -> Generator[Engine]:
    """Start the engine with the words of its command, wait until it answers, and end it. A `PeerError` below
    tells the end of its log."""
    log = log_of(way, place)
    port = _free_port()
    talks = way.engine == TRANSFORMERS
    environment = worker_environment() | variables(way, place)
    with _process(words(way, place, port), environment, log, talks) as process:
        try:
            if talks:
                yield Scripted(process, len(place.cores))
            else:
                _await_health(process, port)
                yield _served(way, port)
        except PeerError as error:
            raise PeerError(f"{error} (its log ends: {_tail(log)})") from error


def _served(way: Way, port: int) -> Served:
    """The running server, with the fields of a request that only it has."""
    if way.engine == OURS:
        return Served(port, _field(get(port, "/version")[1], "version"), {"return_token_ids": True})
    if way.engine == LLAMA:
        return Served(port, _field(get(port, "/props")[1], "build_info"), _WHOLE_DISTRIBUTION)
    version = _field(get(port, "/version")[1], "version")
    return Served(port, version, {"return_token_ids": True}, lambda: draft_counters(get(port, "/metrics")[1]))


def _field(text: str, name: str) -> str:
    return str(_decoded(text.encode(), dict[str, object]).get(name, ""))


def _decoded(data: bytes, kind: type[Answer]) -> Answer:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise PeerError(f"an answer is not understood ({error}): {data[:200]!r}") from error


def _line(process: "subprocess.Popen[bytes]") -> bytes:
    line = process.stdout.readline() if process.stdout is not None else b""
    if not line:
        raise PeerError("the process ended before it answered")
    return line


@contextlib.contextmanager
def _process(
    words: list[str], environment: Mapping[str, str], log: Path, talks: bool
) -> Generator["subprocess.Popen[bytes]"]:
    """A process in a session of its own, so that all its children can be ended with it."""
    with log.open("wb") as errors:
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if talks else errors,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise PeerError(f"{words[0]} cannot be started: {error.strerror}") from error
        try:
            yield process
        finally:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask it to leave, then kill whatever is left of its session."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _await_health(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + _START_S
    while get(port, "/health")[0] != 200:
        if process.poll() is not None:
            raise PeerError(f"it ended with exit code {process.returncode} before it answered")
        if time.monotonic() > deadline:
            raise PeerError(f"it did not answer within {_START_S:.0f} s")
        time.sleep(_LOOK_EVERY_S)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _tail(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").strip()
    return " ".join(text[-_LOG_TAIL:].split())
