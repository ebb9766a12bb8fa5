"""Everybody continues the same texts, in turn: every kind of draft, on this machine and on emulated devices.

Servers are asked over HTTP, so that llama.cpp's can be asked the same. Knows texts, ways and what their
answers and pages of metrics tell.
"""

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lab.drafts.figures import Counters, figures_of
from lab.drafts.texts import prompts_of
from lab.drafts.ways import HEAD, INLINE, LOOKUP, MAY_STOP, MODEL, Drafts, llama_ways, our_ways, words
from ssd_serve.bench.peers.client import Ask, PeerError, Sample
from ssd_serve.bench.peers.engines import launched
from ssd_serve.bench.peers.fleet import Fleet
from ssd_serve.bench.peers.gguf_file import write_gguf
from ssd_serve.bench.peers.head_gguf import write_head_gguf
from ssd_serve.bench.peers.ways import BF16, LLAMA, OURS, PLAIN, Pair, Peers, Place, Way, gguf_of
from ssd_serve.bench.prompts import LOOP, repeated_share
from ssd_serve.bench.rotation import rotate
from ssd_serve.bench.statistics import ratio_interval
from ssd_serve.bench.workload import BALLAST_HIDDEN, ballast_pair
from ssd_serve.devices import this_machine
from ssd_serve.models.hub import embedded_folder
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.recipes.corpus import standard_library
from ssd_serve.recipes.evaluation import held_out_files
from ssd_serve.recipes.head_ballast import add_head_ballast

_SEED = 1

Asks = Mapping[tuple[str, float], Sequence[Ask]]
"""By kind of text and temperature."""


@dataclass(frozen=True, slots=True)
class DraftsPlan:
    """What is measured: texts of each kind, their new tokens, and the table of emulated devices."""

    prompts: int
    tokens: int
    temperatures: tuple[float, ...]
    kinds: tuple[str, ...]
    table: str


def run_drafts(
    plan: DraftsPlan, head: Path | None, llama_server: Path | None, say: Callable[[str], None]
) -> dict[str, object]:
    """Rows by device, kind of text, temperature and way."""
    peers = Peers(llama_server=llama_server)
    missing = left_out(peers)
    for engine, reason in missing.items():
        say(f"{engine} is not measured: {reason}")
    embedded = Pair(embedded_folder("target"), embedded_folder("draft"))
    asks, tuning = _asks(plan, embedded.target)
    cores = this_machine().cores[:2]
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="ssd-bench-") as name:
        work = Path(name)
        emulated = Drafts(embedded.draft, head, plan.table)
        place = Place(Peers(), embedded, cores, work)
        rows += _measure(emulated, place, our_ways(emulated), asks, plan.table, say)
        pair, drafts = _ballast(work, head)
        place = Place(peers, pair, cores, work)
        others = [] if missing else _tuned(drafts, place, tuning, say)
        rows += _measure(drafts, place, [*our_ways(drafts), *others], asks, "this machine", say)
    return {"benchmark": "drafts", "tokens": plan.tokens, "results": rows, "left_out": missing}


def left_out(peers: Peers) -> dict[str, str]:
    """llama.cpp, where it is not there, and what helps."""
    return {engine: reason for engine, reason in peers.missing().items() if engine == LLAMA}


def _asks(plan: DraftsPlan, target: Path) -> tuple[Asks, Sequence[Ask]]:
    """Those that count, and one of each kind on which llama.cpp's shapes are chosen."""
    texts = [file.text for file in held_out_files(target, standard_library()).files]
    encode = Tokenizer(target).encode
    asks: dict[tuple[str, float], Sequence[Ask]] = {}
    tuning: list[Ask] = []
    for kind in plan.kinds:
        prompts = [tuple(encode(text)) for text in prompts_of(kind, texts, plan.prompts + 1)]
        tuning.append(Ask(prompts.pop(), plan.tokens, 0.6, _SEED))
        for temperature in plan.temperatures:
            asks[kind, temperature] = [Ask(prompt, plan.tokens, temperature, _SEED) for prompt in prompts]
    return asks, tuning


def _ballast(work: Path, head: Path | None) -> tuple[Pair, Drafts]:
    """The pair and the head at a larger cost, for everybody, and as GGUF files."""
    named = ballast_pair(work)
    pair = Pair(Path(named["target"]), Path(named["draft"]))
    for folder in (pair.target, pair.draft):
        write_gguf(folder, gguf_of(folder, BF16))
    if head is None:
        return pair, Drafts(pair.draft)
    larger = work / "head"
    add_head_ballast(head, larger, BALLAST_HIDDEN)
    write_head_gguf(larger, pair.target, gguf_of(larger, BF16))
    return pair, Drafts(pair.draft, larger)


def _fleet(drafts: Drafts, place: Place, most: int) -> Fleet:
    return Fleet.of(partial(launched, place=place, words=partial(words, drafts=drafts)), most)


def _tuned(drafts: Drafts, place: Place, asks: Sequence[Ask], say: Callable[[str], None]) -> list[Way]:
    """The fastest shape of each of llama.cpp's ways."""
    best: list[Way] = []
    for shapes in llama_ways(drafts, len(place.cores)).values():
        with closing(_fleet(drafts, place, len(shapes))) as fleet:
            fleet.start(shapes)
            found = rotate(shapes, asks, fleet.ask)
        whole_s = {way: sum(each.whole_s for each in samples) for way, samples in found.items()}
        best.append(min(whole_s, key=whole_s.__getitem__))
        say(f"{best[-1].label}: the best of {len(shapes)}")
    return best


def _measure(
    drafts: Drafts, place: Place, ways: Sequence[Way], asks: Asks, device: str, say: Callable[[str], None]
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    with closing(_fleet(drafts, place, len(ways))) as fleet:
        for way, error in fleet.start(ways).items():
            raise PeerError(f"{way.label}: {error}")
        for (kind, temperature), some in asks.items():
            for way in ways:
                fleet.warm_up(way, some[0])
            before = _counters(fleet, ways)
            found = rotate(ways, some, fleet.ask)
            counted = {way: each - before[way] for way, each in _counters(fleet, ways).items()}
            rows += rows_of({"device": device, "kind": kind, "temperature": temperature}, found, counted)
            say(f"{device}, {kind}, temperature {temperature:g}: measured")
    return rows


def _counters(fleet: Fleet, ways: Iterable[Way]) -> dict[Way, Counters]:
    return {way: Counters.read(fleet.page(way)) for way in ways if way.engine == OURS}


def rows_of(
    group: dict[str, object], found: Mapping[Way, Sequence[Sample]], counted: Mapping[Way, Counters]
) -> list[dict[str, object]]:
    """A row of each way. Texts in which plain decoding loops are left out: anything could look them up."""
    plain = found[Way(OURS, PLAIN)]
    kept = [place for place, each in enumerate(plain) if repeated_share(each.ids) <= LOOP]
    if not kept:
        return [{**group, "texts": 0, "loops_left_out": len(plain)}]
    rows: list[dict[str, object]] = []
    for way, samples in found.items():
        some = [samples[place] for place in kept]
        against = {PLAIN: Way(way.engine, PLAIN, cores=way.cores)}
        if LOOKUP in way.mode and " and " in way.mode:
            stops = MAY_STOP * way.mode.endswith(MAY_STOP)
            against |= {
                one: Way(OURS, f"{one} {INLINE}{stops}") for one in (MODEL, HEAD) if way.mode.startswith(one)
            }
        elif way.engine == LLAMA:
            against["ssd-serve"] = Way(OURS, PLAIN if way.mode == PLAIN else f"{way.mode} inline")
        rows.append(
            {
                **group,
                "engine": way.engine,
                "way": way.mode,
                "shape": way.shape,
                "texts": len(kept),
                "loops_left_out": len(plain) - len(kept),
                **figures_of(some, counted.get(way)),
                "ratios": {
                    name: _ratio([found[other][place] for place in kept], some)
                    for name, other in against.items()
                    if other != way and other in found
                },
            }
        )
    return rows


def _ratio(others: Sequence[Sample], mine: Sequence[Sample]) -> dict[str, Any] | None:
    """How many times as fast whole requests are."""
    found = ratio_interval([one.whole_s / two.whole_s for one, two in zip(others, mine, strict=True)])
    return None if found is None else {**asdict(found), "verdict": str(found.verdict)}
