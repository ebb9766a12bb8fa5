"""`python -m lab.front`: many clients stream from one front end at once, which has a core to itself.

Its engine is a script with the clients on the other core, so that neither is what limits it. Told is what
arrives of what the engine gives, how late, and how much of its core the front end uses. Knows the front end
as its tests do, and no model.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing.sharedctypes import RawArray
from pathlib import Path

import msgspec

import ssd_serve.models as models
from lab.front.others import MARK, Seen, StreamLoad, play_clients, play_engine
from lab.front.ways import FrontWay
from ssd_serve.bench.statistics import percentile
from ssd_serve.bench.tables import text_table
from ssd_serve.errors import SsdError
from ssd_serve.http_port import listen
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.text.serving_tokenizer import ServingTokenizer
from ssd_serve.settings import Settings
from tests.server.fakes import channel_pair
from tests.server.played_servers import wait_until_healthy

_FRONT_CORE, _OTHER_CORE = 0, 1
_PATIENCE_S = 300.0
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class _Trial:
    """One load in one way, and what became of it."""

    loop: str
    parser: str
    streams: int
    tokens_per_round: int
    asked_tokens_per_s: float
    tokens_per_s: float
    late_ms: float
    """Median of all rounds of all streams."""
    late_99_ms: float
    core_used: float
    """Share of the front end's core, 0 to 1."""


def run_front(
    loads: Sequence[StreamLoad], ways: Sequence[FrontWay], passes: int, tell: Callable[[str], None]
) -> dict[str, object]:
    """All loads in all ways, `passes` times each, in turn."""
    if len(os.sched_getaffinity(0)) < 2:
        raise SsdError("the front end needs a core of its own, and its clients another one")
    trials: list[_Trial] = []
    for _ in range(passes):
        for load, way in product(loads, ways):
            trials.append(_trial(load, way))
            tell(text_table(_TITLES, [_row(trials[-1])]))
    return {"benchmark": "front", "trials": [asdict(trial) for trial in trials]}


_TITLES = ("loop", "parser", "streams", "tokens a round", "asked tok/s", "tok/s", "late ms", "p99 ms", "core")


def _row(trial: _Trial) -> tuple[object, ...]:
    asked = (trial.loop, trial.parser, trial.streams, trial.tokens_per_round, round(trial.asked_tokens_per_s))
    late = (round(trial.late_ms, 1), round(trial.late_99_ms, 1))
    return (*asked, round(trial.tokens_per_s), *late, round(trial.core_used, 2))


def table(result: Mapping[str, object]) -> str:
    """As text for a terminal."""
    trials = msgspec.convert(result["trials"], type=list[_Trial])
    return text_table(_TITLES, map(_row, trials))


def _trial(load: StreamLoad, way: FrontWay) -> _Trial:
    with _front_end(load, way) as (port, sent_at):
        parent, child = _FORK.Pipe()
        clients = _FORK.Process(target=play_clients, args=(child, _OTHER_CORE, port, load, sent_at))
        clients.start()
        while sent_at[0] == 0.0 and clients.is_alive():
            time.sleep(0.01)
        used, begun = time.process_time(), time.monotonic()
        try:
            if not parent.poll(_PATIENCE_S):
                raise SsdError("the streams do not end")
            seen: Seen = parent.recv()
        finally:
            clients.kill()
            clients.join()
        used, took = time.process_time() - used, time.monotonic() - begun
    given = load.streams * load.rounds * load.tokens_per_round
    if seen.tokens != given:
        raise SsdError(f"{seen.tokens} tokens came of {given}")
    return _Trial(
        way.loop,
        way.parser,
        load.streams,
        load.tokens_per_round,
        load.tokens_per_s,
        seen.tokens / seen.seconds,
        percentile(seen.late_ms, 50),
        percentile(seen.late_ms, 99),
        used / took,
    )


@contextmanager
def _front_end(load: StreamLoad, way: FrontWay) -> Generator[tuple[int, Sequence[float]]]:
    """Its port, and where the engine writes the moment of each round."""
    tokenizer = Tokenizer(next(Path(models.__path__[0]).resolve().glob("embedded/target")))
    (token,) = tokenizer.encode(MARK, add_special_tokens=False)
    sent_at = RawArray("d", load.rounds)
    ours, theirs = channel_pair()
    engine = _FORK.Process(
        target=play_engine,
        args=(theirs, _OTHER_CORE, tokenizer.vocabulary, token, load, sent_at),
        daemon=True,
    )
    engine.start()
    theirs.close()
    texts = ServingTokenizer()
    texts.arrive(tokenizer)
    server = way.server(Settings(max_running=load.streams), EngineClient(ours), texts)
    sock = listen("127.0.0.1", 0)
    port: int = sock.getsockname()[1]

    def serve() -> None:
        os.sched_setaffinity(0, {_FRONT_CORE})
        way.run(server.serve(sockets=[sock]))

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}")
        yield port, sent_at
    finally:
        server.stop()
        serving.join()
        engine.kill()
        sock.close()
