"""`ssd bench peers`: this engine beside transformers, llama.cpp and vLLM on the same checkpoint and cores.

First a short pass finds each peer's best draft length, then all ways are launched in turn, several times
over. Knows what is run in which order; ways, engines and figures are its neighbours' work.
"""

import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ssd_serve.bench.peers.builds import peer_builds
from ssd_serve.bench.peers.client import Ask, PeerError, Sample
from ssd_serve.bench.peers.engines import Engine, launched
from ssd_serve.bench.peers.figures import Launch, Weights, fastest, ratios, rows, wrong_speculation
from ssd_serve.bench.peers.gguf_file import write_gguf
from ssd_serve.bench.peers.ways import (
    BF16,
    CANDIDATES,
    DTYPES,
    INT8,
    NO_EQUAL,
    OUR_MODES,
    OURS,
    PEERS,
    PLAIN,
    Q8_0,
    TRANSFORMERS,
    Pair,
    Peers,
    Place,
    Way,
    gguf_of,
)
from ssd_serve.bench.prompts import Prompt
from ssd_serve.bench.rig import use_cores
from ssd_serve.bench.workload import ballast_pair, choose_prompts
from ssd_serve.devices import Device
from ssd_serve.errors import UserError
from ssd_serve.recipes.checkpoint import read_checkpoint
from ssd_serve.settings import EMBEDDED, Mode, Settings

_TUNING_PROMPTS, _TUNING_TOKENS, _WARM_UP_TOKENS = 8, 48, 32
_READ_BYTES, _READ_REPEATS = 1 << 30, 9

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    temperatures: tuple[float, ...] = (0.0, 1.0)
    prompts: int = 4
    tokens: int = 128
    launches: int = 3
    dtypes: tuple[str, ...] = DTYPES


@dataclass(slots=True)
class _Run:
    """What has been seen so far."""

    plan: Plan
    place: Place
    asks: Mapping[float, Sequence[Ask]]
    tuning_asks: Mapping[float, Sequence[Ask]]
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
        weights = read_weights(pair, read_speed(len(cores)))
        say("choosing prompts")
        settings = Settings(mode=Mode.AR, draft=EMBEDDED)
        chosen = choose_prompts(
            settings, plan.temperatures, plan.prompts, say, tuning=_TUNING_PROMPTS, tokens=plan.tokens
        )
        asks = {when: _asks(some.prompts, plan.tokens, when) for when, some in chosen.items()}
        tuning = {when: _asks(some.tuning, _TUNING_TOKENS, when) for when, some in chosen.items()}
        run = _Run(plan, place, asks, tuning, say)
        _interleave(run, _schedule(run))
        builds = peer_builds(place)
    return {
        "bench": "peers",
        "results": rows(run.launches, weights),
        "ratios": ratios(run.launches),
        "tuning": rows(run.tuning, weights),
        "failures": run.failures,
        "left_out": _left_out(plan, peers),
        "limits": _limits(weights, INT8 in plan.dtypes),
        "plan": {
            "prompts": plan.prompts,
            "tokens": plan.tokens,
            "launches": plan.launches,
            "cores": len(cores),
            "dtype": ", ".join(plan.dtypes),
        },
        "engines": run.versions,
        "builds": builds,
        "seconds": round(time.time() - started),
    }


def write_pair(folder: Path) -> Pair:
    """The embedded pair with ballast, for everybody: as Hugging Face folders and as GGUF files."""
    target, draft = map(Path, ballast_pair(folder).values())
    for each in (target, draft):
        for weights in (BF16, Q8_0):
            write_gguf(each, gguf_of(each, weights), weights)
    return Pair(target, draft)


def read_weights(pair: Pair, read_per_s: float) -> dict[str, Weights]:
    """What one forward reads in each format: all but the embedding, of which a row is read."""
    return {
        kind: Weights(_read_size(pair.target, kind), _read_size(pair.draft, kind), read_per_s)
        for kind in (BF16, INT8, Q8_0)
    }


def _read_size(checkpoint: Path, kind: str) -> int:
    """Bytes. A matrix has a 4-byte scale for each output in int8, in Q8_0 2 bytes for 32 numbers."""
    weights = [
        weight for name, weight in read_checkpoint(checkpoint).weights.items() if "embed_tokens" not in name
    ]
    vectors = sum(weight.numel() for weight in weights if weight.dim() == 1)
    numbers = sum(weight.numel() for weight in weights if weight.dim() > 1)
    outputs = sum(weight.shape[0] for weight in weights if weight.dim() > 1)
    matrices = {BF16: 2 * numbers, INT8: numbers + 4 * outputs, Q8_0: numbers // 32 * 34}
    return matrices[kind] + (4 if kind == Q8_0 else 2) * vectors


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


def _schedule(run: _Run) -> dict[Way, tuple[float, ...]]:
    """What is measured at which temperatures. Draft lengths found for bf16 serve for 8 bits as well."""
    plan, missing = run.plan, run.place.peers.missing()
    ways = [Way(OURS, mode, dtype=dtype) for dtype in plan.dtypes for mode in OUR_MODES[dtype]]
    schedule: dict[Way, tuple[float, ...]] = dict.fromkeys(ways, plan.temperatures)
    for engine in PEERS:
        dtypes = [dtype for dtype in plan.dtypes if dtype == BF16 or engine not in NO_EQUAL]
        if engine not in missing and dtypes:
            found = {Way(engine, PLAIN): plan.temperatures, **_tune(run, engine)}
            schedule |= {replace(way, dtype=dtype): when for dtype in dtypes for way, when in found.items()}
    return schedule


def _limits(weights: Mapping[str, Weights], eight_bits: bool) -> dict[str, object]:
    sizes = {kind: {"target_bytes": one.target, "draft_bytes": one.draft} for kind, one in weights.items()}
    bf16 = sizes.pop(BF16)
    read = round(weights[BF16].read_per_s / 1e9, 2)
    return {**bf16, "read_gb_per_s": read, "eight_bits": sizes if eight_bits else {}}


def _left_out(plan: Plan, peers: Peers) -> list[dict[str, str]]:
    """Peers that are not measured, or not with weights of 8 bits, and why."""
    missing = peers.missing()
    found = missing | (
        {f"{engine} {INT8}": why for engine, why in NO_EQUAL.items() if engine not in missing}
        if INT8 in plan.dtypes
        else {}
    )
    return [{"engine": engine, "reason": reason} for engine, reason in found.items()]


def _tune(run: _Run, engine: str) -> dict[Way, tuple[float, ...]]:
    """The fastest speculative way of a peer, and the temperatures at which it is the fastest."""
    found: list[Launch] = []
    if engine == TRANSFORMERS:  # it can change its draft while it runs
        with (
            _reporting(run, CANDIDATES[engine][0], "tuning"),
            launched(CANDIDATES[engine][0], run.place) as one,
        ):
            for way in CANDIDATES[engine]:
                one.use(way)
                found += _measure(run, one, way, run.tuning_asks, 0)
    else:
        for way in CANDIDATES[engine]:
            with _reporting(run, way, "tuning"), launched(way, run.place) as one:
                found += _measure(run, one, way, run.tuning_asks, 0)
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


def _asks(prompts: Sequence[Prompt], tokens: int, temperature: float) -> list[Ask]:
    return [Ask(each.tokens, tokens, temperature, each.seed) for each in prompts]


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
