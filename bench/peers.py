"""`ssd bench peers`: this engine beside transformers, llama.cpp and vLLM on the same checkpoint and cores.

First a short pass finds each peer's best draft length, then all ways are launched in turn, several times
over. Knows what is run in which order; ways, engines and figures are its neighbours' work.
"""

import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ssd_serve.bench.both import BALLAST_HIDDEN, DRAFT_LAYERS, TARGET_LAYERS
from ssd_serve.bench.machine import hardware, versions
from ssd_serve.bench.peers_client import Ask, PeerError, Sample
from ssd_serve.bench.peers_engines import Engine, launched
from ssd_serve.bench.peers_figures import Launch, Weights, fastest, ratios, rows, wrong_speculation
from ssd_serve.bench.peers_gguf import write_gguf
from ssd_serve.bench.peers_prompts import choose_prompts
from ssd_serve.bench.peers_ways import (
    CANDIDATES,
    OUR_MODES,
    OURS,
    PEERS,
    PLAIN,
    TRANSFORMERS,
    Pair,
    Peers,
    Place,
    Way,
)
from ssd_serve.bench.rig import use_cores
from ssd_serve.devices import Device
from ssd_serve.errors import UserError
from ssd_serve.models.hub import resolve_model
from ssd_serve.recipes.ballast import add_ballast
from ssd_serve.recipes.checkpoint import read_checkpoint
from ssd_serve.settings import EMBEDDED

_TUNING_PROMPTS, _TUNING_TOKENS, _WARM_UP_TOKENS = 2, 64, 32
_READ_BYTES, _READ_REPEATS = 1 << 30, 9

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    temperatures: tuple[float, ...] = (0.0, 1.0)
    prompts: int = 4
    tokens: int = 128
    launches: int = 3


@dataclass(slots=True)
class _Run:
    """What has been seen so far."""

    plan: Plan
    place: Place
    asks: Mapping[float, Sequence[Ask]]
    say: Say
    launches: list[Launch] = field(default_factory=list)
    tuning: list[Launch] = field(default_factory=list)
    failures: list[dict[str, object]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


def run_peers(
    plan: Plan, peers: Peers, cores: Sequence[int], work: Path | None, say: Say
) -> dict[str, object]:
    """Everything; the result names each failure of a peer, and each peer that is not there."""
    if len(cores) < 2:
        raise UserError("`ssd bench peers` needs two cores; give them with --cores, for example 0-1")
    use_cores(str(Device("cpu", tuple(cores))))
    started = time.time()
    with _folder(work) as folder:
        say("writing the checkpoint")
        pair = write_pair(folder)
        place = Place(peers, pair, tuple(cores), folder)
        weights = Weights(read_size(pair.target), read_size(pair.draft), read_speed(len(cores)))
        say("choosing prompts")
        asks = choose_prompts(plan.temperatures, plan.prompts, plan.tokens, say)
        run = _Run(plan, place, asks, say)
        ways = [Way(OURS, mode) for mode in OUR_MODES]
        schedule: dict[Way, tuple[float, ...]] = dict.fromkeys(ways, plan.temperatures)
        for engine in PEERS:
            if engine not in peers.missing():
                schedule |= {Way(engine, PLAIN): plan.temperatures, **_tune(run, engine)}
        _interleave(run, schedule)
    return {
        "bench": "peers",
        "results": rows(run.launches, weights),
        "ratios": ratios(run.launches),
        "tuning": rows(run.tuning, weights),
        "failures": run.failures,
        "left_out": [{"engine": engine, "reason": reason} for engine, reason in peers.missing().items()],
        "limits": {
            "target_bytes": weights.target,
            "draft_bytes": weights.draft,
            "read_gb_per_s": round(weights.read_per_s / 1e9, 2),
        },
        "plan": {
            "prompts": plan.prompts,
            "tokens": plan.tokens,
            "launches": plan.launches,
            "cores": len(cores),
            "dtype": "bf16",
        },
        "engines": run.versions,
        "seconds": round(time.time() - started),
        "hardware": hardware(),
        "versions": versions(),
    }


def write_pair(folder: Path) -> Pair:
    """The embedded pair with ballast, for everybody: as Hugging Face folders and as GGUF files."""
    pair = Pair(folder / "target", folder / "draft", folder / "target.gguf", folder / "draft.gguf")
    sizes = ((pair.target, pair.target_gguf, TARGET_LAYERS), (pair.draft, pair.draft_gguf, DRAFT_LAYERS))
    for destination, gguf, layers in sizes:
        source = resolve_model(EMBEDDED, "target" if destination == pair.target else "draft")
        add_ballast(source, destination, BALLAST_HIDDEN, layers)
        write_gguf(destination, gguf)
    return pair


def read_size(checkpoint: Path) -> int:
    """Bytes of bf16 weights that one forward reads: all but the embedding, of which a row is read."""
    weights = read_checkpoint(checkpoint).weights
    return sum(2 * weight.numel() for name, weight in weights.items() if "embed_tokens" not in name)


def read_speed(threads: int) -> float:
    """Bytes a second that these cores read from memory: the best of some sums over 1 GiB."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        numbers = torch.ones(_READ_BYTES // 4, dtype=torch.float32)
        seconds: list[float] = []
        for _ in range(_READ_REPEATS):
            started = time.perf_counter()
            numbers.sum()
            seconds.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(before)
    return _READ_BYTES / min(seconds)


def _tune(run: _Run, engine: str) -> dict[Way, tuple[float, ...]]:
    """The fastest speculative way of a peer, and the temperatures at which it is the fastest."""
    few = {
        temperature: [_shorter(ask, _TUNING_TOKENS) for ask in asks[:_TUNING_PROMPTS]]
        for temperature, asks in run.asks.items()
    }
    found: list[Launch] = []
    if engine == TRANSFORMERS:  # it can change its draft while it runs
        with (
            _reporting(run, CANDIDATES[engine][0], "tuning"),
            launched(CANDIDATES[engine][0], run.place) as one,
        ):
            for way in CANDIDATES[engine]:
                one.use(way)
                found += _measure(run, one, way, few, 0)
    else:
        for way in CANDIDATES[engine]:
            with _reporting(run, way, "tuning"), launched(way, run.place) as one:
                found += _measure(run, one, way, few, 0)
    run.tuning += found
    best: dict[Way, tuple[float, ...]] = {}
    for temperature in run.plan.temperatures:
        here = {launch.way: [launch] for launch in found if launch.temperature == temperature}
        winner = fastest(here)
        if winner is not None:
            best[winner] = (*best.get(winner, ()), temperature)
    return best


def _interleave(run: _Run, schedule: Mapping[Way, Sequence[float]]) -> None:
    """Every way once in each round of launches; the order rotates from round to round."""
    order = list(schedule)
    for number in range(run.plan.launches):
        turn = number * len(order) // run.plan.launches
        for way in order[turn:] + order[:turn]:
            asks = {temperature: run.asks[temperature] for temperature in schedule[way]}
            with _reporting(run, way, f"launch {number + 1}"), launched(way, run.place) as engine:
                run.versions[way.engine] = engine.version
                run.launches += _measure(run, engine, way, asks, number)


def _measure(
    run: _Run, engine: Engine, way: Way, asks: Mapping[float, Sequence[Ask]], number: int
) -> list[Launch]:
    """All asks at all temperatures, each temperature after a warm-up that is not counted."""
    found: list[Launch] = []
    for temperature, some in asks.items():
        with _reporting(run, way, f"temperature {temperature:g}"):
            engine.ask(_shorter(some[0], _WARM_UP_TOKENS))
            samples: list[Sample] = [engine.ask(ask) for ask in some]
            reason = wrong_speculation(way, samples)
            if reason is not None:
                raise PeerError(reason)
            launch = Launch(way, temperature, number, tuple(samples))
            run.say(f"  {way.label}, temperature {temperature:g}: {launch.tokens_per_s:.1f} tokens/s")
            found.append(launch)
    return found


@contextmanager
def _reporting(run: _Run, way: Way, when: str) -> Generator[None]:
    """A failure of an engine is part of the result and ends nothing else."""
    try:
        yield
    except PeerError as error:
        run.say(f"  {way.label} failed: {error}")
        run.failures.append({"way": way.label, "when": when, "reason": str(error)})


def _shorter(ask: Ask, tokens: int) -> Ask:
    return Ask(ask.prompt, min(ask.tokens, tokens), ask.temperature, ask.seed)


@contextmanager
def _folder(work: Path | None) -> Generator[Path]:
    """The folder of checkpoints and logs: the given one, which stays, or one that goes with the run."""
    if work is not None:
        work.mkdir(parents=True, exist_ok=True)
        yield work.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="ssd-peers-") as folder:
        yield Path(folder)
