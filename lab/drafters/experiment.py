"""`python -m lab.drafters`: what more drafters give a crowd, and what they cost the verifier's host.

In virtual time (`lab.virtual`): every drafter has a device of its own that a table times. Speculation
throughput is what reaches the verifier's replicas a second while all requests decode. The host's time is
processor time of this machine. Knows engines and figures; not how drafters share requests.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from lab.drafters.crowd import CrowdPlan, DrafterCrowd
from lab.drafters.rig import DraftedEngine
from lab.virtual.rig import TimedPair
from ssd_serve.bench.prompts import Prompt
from ssd_serve.errors import SsdError
from ssd_serve.models.interface import Model


@dataclass(frozen=True, slots=True)
class _Seen:
    """Counters at one moment."""

    virtual_s: float
    host_s: float
    drafters_host_s: float
    rounds: int
    rows: int
    expansions: int
    candidates: int
    tokens: int
    request_rounds: int
    hits: int
    misses: int
    moves: int


def run_drafters(
    pair: TimedPair,
    load_draft: Callable[[], Model],
    prompts: Sequence[Prompt],
    plan: CrowdPlan,
    table: str,
    say: Callable[[str], None],
) -> dict[str, object]:
    """All numbers of drafters; `load_draft` gives each drafter a model of its own. Checks that all of them
    give the same texts."""
    drafts = [pair.draft, *(load_draft() for _ in range(max(plan.drafters) - 1))]
    rows: list[dict[str, object]] = []
    texts: dict[int, tuple[int, ...]] = {}
    for count in plan.drafters:
        say(f"{count} drafter{'s' * (count > 1)}")
        row, found = _run(pair, drafts[:count], prompts, plan)
        if texts and found != texts:
            raise SsdError(f"{count} drafters changed a text")
        texts = found
        rows.append({"drafters": count, **row})
    first = next((row for row in rows if row["drafters"] == 1), rows[0])
    for row in rows:
        row["scaling"] = _number(row["candidates_per_s"]) / _number(first["candidates_per_s"])
    return {
        "benchmark": "drafters",
        "table": table,
        "plan": asdict(plan),
        "rows": rows,
    }


def _run(
    pair: TimedPair, drafts: Sequence[Model], prompts: Sequence[Prompt], plan: CrowdPlan
) -> tuple[dict[str, object], dict[int, tuple[int, ...]]]:
    rig = DraftedEngine(pair, drafts, plan.requests, plan.width, plan.candidates, plan.depth)
    rig.engine.drain()
    crowd = DrafterCrowd(rig.engine, rig.step)
    crowd.submit(prompts, plan)
    crowd.run_until(lambda: crowd.decoding)
    first = _seen(rig)
    crowd.run_until(lambda: crowd.ended)
    last = _seen(rig)
    crowd.run_until(lambda: False)
    return _figures(first, last), crowd.texts


def _seen(rig: DraftedEngine) -> _Seen:
    clocked, figures, drafters = rig.engine.clocked, rig.engine.totals.figures, rig.drafters
    return _Seen(
        rig.clock.now,
        rig.host.seconds,
        drafters.host.seconds,
        clocked.rounds,
        clocked.rows,
        drafters.expansions,
        drafters.candidates,
        figures.tokens,
        figures.rounds,
        figures.hits,
        figures.misses,
        drafters.moves,
    )


def _figures(first: _Seen, last: _Seen) -> dict[str, object]:
    seconds = last.virtual_s - first.virtual_s
    if seconds <= 0:
        raise SsdError("the first request ended before all prompts were read: ask for more tokens")
    rounds = max(1, last.rounds - first.rounds)
    judged = max(1, last.hits - first.hits + last.misses - first.misses)
    return {
        "virtual_s": seconds,
        "rounds": rounds,
        "expansions_per_s": (last.expansions - first.expansions) / seconds,
        "candidates_per_s": (last.candidates - first.candidates) / seconds,
        "tokens_per_s": (last.tokens - first.tokens) / seconds,
        "tokens_per_round": (last.tokens - first.tokens) / max(1, last.request_rounds - first.request_rounds),
        "rows_per_round": (last.rows - first.rows) / rounds,
        "hit_rate": (last.hits - first.hits) / judged,
        "moves": last.moves - first.moves,
        "host_us_per_round": 1e6 * (last.host_s - first.host_s) / rounds,
        "drafters_host_us_per_round": 1e6 * (last.drafters_host_s - first.drafters_host_s) / rounds,
    }


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
