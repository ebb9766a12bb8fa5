"""`python -m lab.bodies`: bodies of every kind are sent to a front end, one at a time.

What is told is the longest time for which its event loop did not come round, in CPU time of the process,
and by how much its memory grew. CPU time leaves out what other processes do; it counts what other threads of
the front end do meanwhile, so it is at least what a stream would wait for on a core of its own. The engine is
a script in a process of its own. Knows the front end as its tests do, and no model.
"""

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import msgspec
import psutil  # type: ignore[import-untyped]

import ssd_serve.models as models
from lab.bodies.kinds import BodyKind, all_kinds
from ssd_serve.bench.tables import text_table
from ssd_serve.cluster.channels.channel import SocketChannel
from ssd_serve.errors import SsdError
from ssd_serve.http_port import listen
from ssd_serve.memory import settle_memory
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.http.serving import build_server
from ssd_serve.server.text.serving_tokenizer import ServingTokenizer
from ssd_serve.settings import Settings
from tests.server.fakes import READY, FakeEngine, channel_pair, say
from tests.server.played_servers import wait_until_healthy

CONTEXT = 131_072
_PROMPT_CHUNK = 2048
"""Prompt tokens of which one report tells; the verifier's default is 256."""
_PATIENCE_S = 300.0
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class _Cost:
    """What one kind cost, at worst."""

    kind: str
    body_mib: float
    status: int
    longest_hold_ms: float
    grown_mib: float


class _Probe:
    """A task that wants its turn every millisecond."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        """For ever."""
        last = time.process_time()
        while True:
            await asyncio.sleep(0.001)
            turn = time.process_time()
            self.longest_s = max(self.longest_s, turn - last)
            last = turn


def run_bodies(only: Sequence[str], passes: int, tell: Callable[[str], None]) -> dict[str, object]:
    """Send the kinds whose name has one of `only` in it, or all."""
    tokenizer = Tokenizer(next(Path(models.__path__[0]).resolve().glob("embedded/target")))
    (token,) = tokenizer.encode("aaaaaaaa", add_special_tokens=False)[:1]
    costs: list[_Cost] = []
    with _front_end(tokenizer) as (url, probe):
        for kind in all_kinds(token):
            if only and not any(part in kind.name for part in only):
                continue
            costs.append(_cost(url, kind, probe, passes))
            tell(f"{costs[-1].longest_hold_ms} ms: {costs[-1].kind}")
    return {
        "benchmark": "bodies",
        "context": CONTEXT,
        "passes": passes,
        "costs": [asdict(cost) for cost in costs],
    }


def table(result: Mapping[str, object]) -> str:
    """As text for a terminal, the longest first."""
    costs = msgspec.convert(result["costs"], type=list[_Cost])
    costs.sort(key=lambda cost: cost.longest_hold_ms, reverse=True)
    rows = ((cost.longest_hold_ms, cost.grown_mib, cost.body_mib, cost.status, cost.kind) for cost in costs)
    return text_table(("hold ms", "+MiB", "body MiB", "status", "kind"), rows)


def _cost(url: str, kind: BodyKind, probe: _Probe, passes: int) -> _Cost:
    held: list[float] = []
    grown: list[float] = []
    status = 0
    for _ in range(passes):
        with _memory() as memory:
            probe.longest_s = 0.0
            status = _ask(url, kind)
            held.append(1e3 * probe.longest_s)
        grown.append(memory.grown_mib)
    size = len(kind.body) / 2**20
    return _Cost(kind.name, round(size, 2), status, round(max(held), 1), round(max(grown), 1))


def _ask(url: str, kind: BodyKind) -> int:
    """The status that another process is answered with."""
    parent, child = _FORK.Pipe()
    client = _FORK.Process(target=_send, args=(child, url, kind))
    client.start()
    try:
        if not parent.poll(_PATIENCE_S):
            raise SsdError(f"no answer to {kind.name}")
        return int(parent.recv())
    finally:
        client.kill()
        client.join()


def _send(pipe: "Connection[int, int]", url: str, kind: BodyKind) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(url + kind.path, content=kind.body, headers=headers, timeout=_PATIENCE_S)
    pipe.send(answer.status_code)


class _Memory:
    """The most that this process has grown by."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before = self._process.memory_info().rss
        self.grown_mib = 0.0

    def look(self) -> None:
        grown = (self._process.memory_info().rss - self._before) / 2**20
        self.grown_mib = max(self.grown_mib, grown)


@contextmanager
def _memory() -> Generator[_Memory]:
    memory, over = _Memory(), threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            memory.look()

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield memory
    finally:
        over.set()
        watching.join()


@contextmanager
def _front_end(tokenizer: Tokenizer) -> Generator[tuple[str, _Probe]]:
    """A server in this process, whose engine is a script in another one."""
    ours, theirs = channel_pair()
    engine = _FORK.Process(target=_play, args=(theirs, tokenizer.vocabulary), daemon=True)
    engine.start()
    theirs.close()
    texts = ServingTokenizer()
    texts.arrive(tokenizer)
    probe = _Probe()
    server = build_server(Settings(), EngineClient(ours), texts)
    sock = listen("127.0.0.1", 0)
    settle_memory()

    async def live() -> None:
        running = asyncio.ensure_future(probe.run())
        await server.serve(sockets=[sock])
        running.cancel()

    serving = threading.Thread(target=lambda: asyncio.run(live()))
    serving.start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        wait_until_healthy(url)
        yield url, probe
    finally:
        server.stop()
        serving.join()
        engine.kill()
        sock.close()


def _play(channel: SocketChannel, vocabulary: int) -> None:
    engine = FakeEngine(channel, lambda _: say("hello " * 400, group=4), prompt_chunk=_PROMPT_CHUNK)
    engine.tell(msgspec.structs.replace(READY, context=CONTEXT, vocabulary=vocabulary))
    engine.start()
    threading.Event().wait()
