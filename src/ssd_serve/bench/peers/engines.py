"""The engines of the comparison: their modes and shapes, the command that starts each, and one client.

Every engine gets the same GGUF file, the same cores, the same requests and no prompt cache.
"""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import IO

import msgspec
import psutil  # type: ignore[import-untyped]

from ssd_serve.base.errors import SsdError
from ssd_serve.bench.client import COMPLETIONS, Answer, Endpoint, Events, LoadRequest, Recording, read

OURS, LLAMA = "ssd-serve", "llama.cpp"
PLAIN, DRAFT, LOOKUP, BOTH = "plain", "draft", "n-gram", "draft+n-gram"
OUR_MODES = ("ar", "sd", "ssd", "auto")
"""A colon and a number after it limit the target to so many cores."""
LLAMA_MODES = (PLAIN, LOOKUP, DRAFT, BOTH)
LONGEST_PROMPT = 1280
"""Most tokens of a prompt; with the new tokens they fit the context of small models."""
_CONTEXT = 2048
_LOOKUPS = ((4, 2), (8, 2), (8, 4), (16, 3), (32, 6), (48, 12))
"""Lengths and matches of lookups that are tried; the last are llama.cpp's defaults."""
_START_S, _STOP_S, _POLL_S, _ANSWER_S = 300.0, 15.0, 0.2, 300.0
_IDLE_SHARE, _IDLE_WINDOW_S, _IDLE_TIMEOUT_S = 0.3, 0.1, 20.0
"""Share of a core that all idle engines may use together; CPU times have a resolution of 10 ms."""
_SPIN = "while True: pass"
_BURST = """
import time
while True:
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass
    time.sleep(0.7)
"""
_BROKEN_KERNELS = (-signal.SIGSEGV, -signal.SIGILL)


class PeerError(SsdError):
    """An engine did not start, or did not answer as it should."""


@dataclass(frozen=True, slots=True)
class PeerMode:
    """An engine in one mode, and its shape.

    `length`: drafted tokens a round; `threshold`: least draft probability; `match`: size of the looked-up
    n-gram; `cores`: threads of the target; `draft_cores`: threads of the draft; 0: not given.
    """

    engine: str
    mode: str
    length: int = 0
    threshold: float = 0.0
    match: int = 0
    cores: int = 0
    draft_cores: int = 0

    @property
    def name(self) -> str:
        """Engine and mode, without the shape."""
        return f"{self.engine} {self.mode}"

    @property
    def shape(self) -> str:
        """The tuned parameters; empty if the engine decides."""
        threads = f"{self.cores}+{self.draft_cores}" if self.draft_cores else f"{self.cores}"
        parts = (
            f"{self.length}" if self.length else "",
            f"p >= {self.threshold:g}" if self.threshold else "",
            f"match {self.match}" if self.match else "",
            f"threads {threads}" if self.cores else "",
        )
        return ", ".join(part for part in parts if part)


def shapes_to_try(mode: str, cores: int) -> list[PeerMode]:
    """Return the shapes of a mode of llama.cpp: plain with every number of threads, others with this number."""
    whole = PeerMode(LLAMA, mode, cores=cores)
    if mode == PLAIN:
        return [replace(whole, cores=count) for count in range(1, cores + 1)]
    if mode == LOOKUP:
        return [replace(whole, length=length, match=match) for length, match in _LOOKUPS]
    whole = replace(whole, draft_cores=cores, match=4 if mode == BOTH else 0)
    drafts = product((2, 4, 8), (0.0, 0.5))
    return [replace(whole, length=length, threshold=least) for length, least in drafts]


@dataclass(frozen=True, slots=True)
class Place:
    """Describes the load of all engines: the model as the user names it, its file, and the concurrent users."""

    model: str
    file: Path
    llama_server: Path
    llama_draft: Path | None
    llama_flags: Sequence[str]
    users: int


def command(mode: PeerMode, place: Place, port: int) -> list[str]:
    """Return the command that starts an engine in this mode."""
    if mode.engine == OURS:
        name, _, cores = mode.mode.partition(":")
        words = [sys.executable, "-m", "ssd_serve", "serve", place.model, "--mode", name]
        words += ["--target-device", f"cpu:0-{int(cores) - 1}".replace("0-0", "0")] if cores else []
        words += ["--port", str(port), "--max-running", str(place.users), "--no-prefix-cache"]
        return [*words, "--log-level", "warning", "--generation-config", "none"]  # the whole distribution
    words = [str(place.llama_server), "-m", str(place.file), "--port", str(port), "--host", "127.0.0.1"]
    words += ["-t", str(mode.cores), "-tb", str(mode.cores), *place.llama_flags]
    words += ["-c", str(_CONTEXT * place.users), "-np", str(place.users), "-cram", "0"]
    kinds = {DRAFT: "draft-simple", LOOKUP: "ngram-simple", BOTH: "ngram-simple,draft-simple"}
    if mode.mode != PLAIN:
        words += ["--spec-type", kinds[mode.mode]]
    if mode.mode in (DRAFT, BOTH):
        words += ["-md", str(place.llama_draft), "-td", str(mode.draft_cores), "-tbd", str(mode.draft_cores)]
        words += ["--spec-draft-n-max", str(mode.length), "--spec-draft-p-min", f"{mode.threshold:g}"]
    if mode.mode in (LOOKUP, BOTH):
        words += ["--spec-ngram-simple-size-n", str(mode.match)]
        words += ["--spec-ngram-simple-size-m", str(mode.length)]
    return words


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """The times and counts of an answer, and its text."""

    timed: Answer
    text: str


class PeerServer:
    """A started engine behind an OpenAI endpoint on loopback."""

    def __init__(self, mode: PeerMode, port: int, process: "subprocess.Popen[bytes]") -> None:
        self.mode = mode
        self._port = port
        self._process = process

    def ask(self, request: LoadRequest, temperature: float, *, exact: bool = True) -> PeerAnswer:
        """Stream one completion, of all its tokens if `exact`. Raises `PeerError` if it fails."""
        more: dict[str, object] = {}
        if self.mode.engine == LLAMA:  # llama.cpp truncates the distribution by default
            more = {"cache_prompt": False, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        ids = self.mode.engine == OURS
        endpoint = Endpoint("", temperature, exact=exact, token_ids=ids, more=more)
        recording = Recording(request, sent_s=time.perf_counter())
        recording.due_s = recording.sent_s
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_ANSWER_S)
        try:  # the standard library needs less of the measured cores than httpx
            headers = {"Content-Type": "application/json"}
            connection.request("POST", COMPLETIONS, msgspec.json.encode(endpoint.body(request)), headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise PeerError(f"{self.mode.name} answered {response.status}: {response.read(300)!r}")
            while line := response.readline():
                recording.reads.append((time.perf_counter(), line))
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(f"{self.mode.name} broke off its answer: {error!r}") from error
        finally:
            connection.close()
        recording.ended_s = time.perf_counter()
        answer = read(recording, exact)
        if answer.error or not answer.arrivals:
            raise PeerError(f"{self.mode.name}: {answer.error or 'the answer is empty'}")
        return PeerAnswer(answer, _text(recording))

    def cpu_s(self) -> float:
        """Return the processor seconds of the engine's processes."""
        total = 0.0
        with contextlib.suppress(psutil.Error):
            own = psutil.Process(self._process.pid)
            for process in (own, *own.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    total += times.user + times.system
        return total


def _text(recording: Recording) -> str:
    events = Events()
    chunks = events.feed(b"".join(data for _, data in recording.reads))
    return "".join(choice.text or "" for chunk in chunks for choice in chunk.choices)


def await_idle(engines: "list[PeerServer]") -> float:
    """Wait until all engines use almost no CPU, and return the seconds waited.

    Raises `PeerError` if an engine keeps working after its answer.
    """
    started = time.monotonic()
    while True:
        before = {engine: engine.cpu_s() for engine in engines}
        time.sleep(_IDLE_WINDOW_S)
        used = {engine: engine.cpu_s() - seconds for engine, seconds in before.items()}
        if sum(used.values()) <= _IDLE_SHARE * _IDLE_WINDOW_S:
            return time.monotonic() - started
        if time.monotonic() - started > _IDLE_TIMEOUT_S:
            busiest = max(used, key=lambda engine: used[engine])
            raise PeerError(f"{busiest.mode.name} uses a core for {_IDLE_TIMEOUT_S:.0f} s after its answer")


@contextlib.contextmanager
def launched(mode: PeerMode, place: Place) -> Generator[PeerServer]:
    """Start an engine in a session of its own, wait until it answers, and end it with all its children."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    words = command(mode, place, port)
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        except OSError as error:
            raise PeerError(f"{words[0]} cannot be started: {error.strerror}") from error
        try:
            _await_start(mode, process, port, log)
            yield PeerServer(mode, port, process)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _await_start(mode: PeerMode, process: "subprocess.Popen[bytes]", port: int, log: IO[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while not _answers(port):
        code = process.poll()
        if code in _BROKEN_KERNELS:
            raise PeerError(f"{mode.name} crashed; without AMX it may run: --llama-flag=--no-repack")
        if code is not None or time.monotonic() > deadline:
            log.seek(0)
            end = " ".join(log.read().decode(errors="replace").strip()[-600:].split())
            raise PeerError(f"{mode.name} did not start (its log ends: {end})")
        time.sleep(_POLL_S)


@contextlib.contextmanager
def disturbing(busy: str, cores: int) -> Generator[None]:
    """Use cores by processes, as other programs would: `none`, `one`, `all`, or `burst` (all, 0.3 s of each second)."""
    count = {"none": 0, "one": 1}.get(busy, cores)
    words = [sys.executable, "-c", _BURST if busy == "burst" else _SPIN]
    processes = [subprocess.Popen(words, stdin=subprocess.DEVNULL) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
