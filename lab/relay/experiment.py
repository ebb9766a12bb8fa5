"""What it costs to answer in several processes, and what decoding texts beside the event loop would bring.

The hub is that of a server whose workers have all clients: it only hands on. Its engine is a script, and the
worker a sink, both on the other core. Threads decode as the front end does, and nothing else.
"""

import asyncio
import multiprocessing
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import ssd_serve.models as models
from lab.front.others import MARK, StreamLoad, play_engine
from ssd_serve.cluster.channels.channel import Intake, SocketChannel
from ssd_serve.errors import SsdError
from ssd_serve.front_messages import FromWorker, ToWorker
from ssd_serve.messages import Finished, SamplingParameters
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.engine.submitted import Report, Wanted
from ssd_serve.server.workers.hub import Hub
from ssd_serve.server.workers.process import apply_for_work
from ssd_serve.server.workers.relayed import RelayedEngine
from ssd_serve.server.workers.seat import Post
from tests.server.fakes import channel_pair

_HUB_CORE, _OTHER_CORE = 0, 1
_PATIENCE_S = 120.0
_TRIES = 5
_HOPS = 200
_FORK = multiprocessing.get_context("fork")


def run_relay(streams: int, rounds: int, tokens: int) -> dict[str, object]:
    """`streams` requests of `rounds` reports each through a hub; `tokens` decoded by each thread."""
    if len(os.sched_getaffinity(0)) < 2:
        raise SsdError("the hub needs a core of its own, and the others another one")
    tokenizer = Tokenizer(next(Path(models.__path__[0]).resolve().glob("embedded/target")))
    hub = [_relay(tokenizer, streams, rounds) for _ in range(_TRIES)]
    return {
        "benchmark": "relay",
        "streams": streams,
        "reports": streams * rounds,
        "hub_us_a_report": [cpu_s / (streams * rounds) * 1e6 for cpu_s in hub],
        **_decoding(tokenizer, tokens),
    }


def _relay(tokenizer: Tokenizer, streams: int, rounds: int) -> float:
    """Seconds of the hub's processor."""
    load = StreamLoad(streams, 1, 1e9, rounds * streams / 1e9)
    sent_at = [0.0] * load.rounds
    ours, theirs = channel_pair()
    (token,) = tokenizer.encode(MARK, add_special_tokens=False)
    words = (theirs, _OTHER_CORE, tokenizer.vocabulary, token, load, sent_at)
    engine = _FORK.Process(target=play_engine, args=words, daemon=True)
    one, other = socket.socketpair()
    parent, child = _FORK.Pipe()
    worker = _FORK.Process(target=_play_worker, args=(child, other, streams), daemon=True)
    engine.start()
    worker.start()
    theirs.close()
    other.close()
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {_HUB_CORE})
    try:
        return asyncio.run(
            _hub(EngineClient(ours), SocketChannel(one, intake=Intake(kinds=FromWorker)), parent)
        )
    finally:
        os.sched_setaffinity(0, before)
        engine.kill()
        worker.kill()


class _Entrance:
    """Lets one worker in."""

    def __init__(self, channel: SocketChannel) -> None:
        self._channel: SocketChannel | None = channel

    def accept(self, intake: Intake) -> SocketChannel | None:
        """The worker, the first time."""
        del intake
        channel, self._channel = self._channel, None
        return channel


async def _hub(client: EngineClient, worker: SocketChannel, told: Connection) -> float:
    """From the moment when the worker has all requests until it has all reports."""
    client.start()
    hub = Hub(client)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pids = {"api-1": os.getpid()}  # who made the pair of sockets
        door = _Entrance(worker)
        hub.offer(Post(door, lambda: pids, lambda _pid: None, lambda: None, listening, b"", Path(), b""))
        hub.start()
        await _until(told)
        before = time.process_time()
        await _until(told)
        used = time.process_time() - before
    client.stop()
    worker.close()
    return used


async def _until(told: Connection) -> None:
    """Until the worker says so; the hub works meanwhile."""
    loop, said = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(told.fileno(), said.set)
    await asyncio.wait_for(said.wait(), _PATIENCE_S)
    loop.remove_reader(told.fileno())
    told.recv()


def _play_worker(told: Connection, connection: socket.socket, streams: int) -> None:
    """Ask for all streams, and take what comes."""
    os.sched_setaffinity(0, {_OTHER_CORE})
    channel = SocketChannel(connection, intake=Intake(kinds=ToWorker, descriptors=True))
    asyncio.run(_take_all(told, channel, streams))


async def _take_all(told: Connection, channel: SocketChannel, streams: int) -> None:
    hired, listening = apply_for_work(channel, "api-1")
    listening.close()
    engine, left, ended = RelayedEngine(channel, hired.first_request), [streams], asyncio.Event()

    def deliver(report: Report) -> None:
        if isinstance(report, Finished):
            left[0] -= 1
            if not left[0]:
                ended.set()

    engine.start()
    parameters = SamplingParameters(max_tokens=1 << 20)
    engine.submit_all([Wanted((1, 2), parameters, seed, deliver) for seed in range(streams)])
    told.send("asked")
    await ended.wait()
    told.send("ended")


def _decoding(tokenizer: Tokenizer, tokens: int) -> dict[str, object]:
    """Microseconds a token here, of a hop to a thread, and how much more two threads decode than one."""
    ids = tokenizer.encode("def read(path):\n    return [line for line in open(path)]\n") * tokens
    ids = ids[:tokens]

    def decode() -> float:
        stream, begun = tokenizer.stream((), True), time.perf_counter()
        for token in ids:
            stream.push(token)
        return time.perf_counter() - begun

    here = [decode() for _ in range(_TRIES)]
    with ThreadPoolExecutor(2) as pool:
        both: list[float] = []
        for _ in range(_TRIES):
            begun = time.perf_counter()
            list(pool.map(lambda _: decode(), range(2)))
            both.append(time.perf_counter() - begun)
        hops = asyncio.run(_hops(pool))
    gains = [2 * alone / together for alone, together in zip(here, both, strict=True)]
    return {
        "decoded_tokens": tokens,
        "decode_us": [each / tokens * 1e6 for each in here],
        "hop_us": hops,
        "two_threads_gain": gains,
    }


async def _hops(pool: ThreadPoolExecutor) -> list[float]:
    """Microseconds to a thread and back to the loop, with nothing done there."""
    loop, found = asyncio.get_running_loop(), list[float]()
    for _ in range(_HOPS):
        begun = time.perf_counter()
        await loop.run_in_executor(pool, bool)
        found.append((time.perf_counter() - begun) * 1e6)
    return found
