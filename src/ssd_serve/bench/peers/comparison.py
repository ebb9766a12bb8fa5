"""`ssd bench peers`: this engine beside transformers, llama.cpp and vLLM on the same checkpoint and cores.

First each mode of each peer is tuned, then everybody is launched several times and asked in one rotation over
ways and prompts. Knows what is measured in which order; ways, engines and figures are its neighbours' work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import msgspec

from ssd_serve.bench.journal import OutOfTimeError
from ssd_serve.bench.peers.client import Ask, Sample
from ssd_serve.bench.peers.duration import answers_of
from ssd_serve.bench.peers.figures import Answers, mapped, ratios, row, speeds, wrong_speculation
from ssd_serve.bench.peers.result import Plan, Tuned
from ssd_serve.bench.peers.session import TUNING, Session
from ssd_serve.bench.peers.ways import (
    INT8,
    NO_EQUAL,
    OUR_MODES,
    OURS,
    PEER_MODES,
    Peers,
    Way,
    neighbours,
    shapes,
)
from ssd_serve.bench.prompts import Chosen, Prompt
from ssd_serve.bench.rotation import tune

Group = tuple[str, float]
"""Weights and temperature: who is compared."""
_OTHER_SEEDS = (1000, 2000)
"""Where two shapes are compared again, so that a text that one of them was lucky to sample counts once."""


@dataclass(slots=True)
class Measured:
    """What has been found so far."""

    tuning: list[Tuned] = field(default_factory=list[Tuned])
    ways: dict[Group, list[Way]] = field(default_factory=dict[Group, list[Way]])
    samples: dict[Group, dict[Way, dict[int, list[Sample | None]]]] = field(
        default_factory=dict[Group, dict[Way, dict[int, list[Sample | None]]]]
    )


def measure(session: Session, plan: Plan, peers: Peers, chosen: Mapping[float, Chosen]) -> Measured:
    """Everything, or as much as there is time for."""
    found = Measured()
    groups = list(product(plan.dtypes, plan.temperatures))
    try:
        for dtype, temperature in groups:
            asks = _asks(chosen[temperature].tuning, plan.tokens, temperature)
            ways = found.ways[dtype, temperature] = [Way(OURS, mode, dtype=dtype) for mode in OUR_MODES]
            for engine, mode in product(peers.engines(dtype), PEER_MODES):
                best, tuned = _tuned(session, shapes(engine, mode, plan.cores, dtype), plan.cores, asks)
                found.tuning.append(tuned)
                if tuned.tried.get(best.shape, 1.0):  # else none of its shapes can be measured
                    ways.append(best)
        for launch in range(1, plan.launches + 1):
            for group in groups:
                asks = _asks(chosen[group[1]].prompts, plan.tokens, group[1])
                rotation = session.rotation(launch, _turned(found.ways[group], launch), asks)
                for way, samples in rotation.items():
                    found.samples.setdefault(group, {}).setdefault(way, {})[launch] = samples
                session.say(
                    f"launch {launch} of {plan.launches}, {group[0]}, temperature {group[1]:g}: measured, "
                    f"{session.given.seconds / 60:.0f} minutes so far"
                )
    except OutOfTimeError as end:
        session.say(str(end))
    finally:
        session.fleet.close()
    return found


def _tuned(session: Session, begin: Sequence[Way], cores: int, asks: Sequence[Ask]) -> tuple[Way, Tuned]:
    """The shape whose whole requests are the fastest."""

    def compared(ways: Sequence[Way], some: Sequence[Ask]) -> dict[Way, float]:
        return speeds(session.rotation(TUNING, ways, some))

    others = [replace(ask, seed=ask.seed + more) for more in _OTHER_SEEDS for ask in asks]
    best, tried = tune(begin, partial(neighbours, cores=cores), compared, asks, others)
    shown = {way.shape: round(value, 1) for way, value in tried.items()}
    temperature = asks[0].temperature
    session.say(f"  {best.label}, temperature {temperature:g}: the best of {shown}")
    return best, Tuned(
        name=best.name, dtype=best.dtype, temperature=temperature, best=best.shape, tried=shown
    )


def told(session: Session, plan: Plan, peers: Peers, found: Measured) -> dict[str, object]:
    """The fields of `result.Result` that the measurement gives."""
    answers: dict[Group, dict[Way, Answers]] = {}
    for group, ways in found.samples.items():
        answers[group] = {}
        for way in found.ways[group]:
            got = mapped(ways[way])
            reason = wrong_speculation(way, got.values())
            if got and reason is None:
                answers[group][way] = got
            elif got:
                when = f"temperature {group[1]:g}"
                session.failures.append({"way": way.label, "when": when, "reason": reason})
    rows = [row(way, group[1], got) for group, ways in answers.items() for way, got in ways.items()]
    judged = [one for group, ways in answers.items() for one in ratios(*group, ways)]
    return {
        "bench": "peers",
        "results": msgspec.to_builtins(rows),
        "ratios": msgspec.to_builtins(judged),
        "tuning": msgspec.to_builtins(found.tuning),
        "failures": session.failures,
        "left_out": _left_out(plan, peers),
        "plan": msgspec.to_builtins(plan),
        "missing": answers_of(plan, peers) - sum(one.answers for one in rows),
        "engines": session.fleet.versions,
    }


def _left_out(plan: Plan, peers: Peers) -> list[dict[str, str]]:
    """Peers that are not measured, or not with weights of 8 bits, and why."""
    missing = peers.missing()
    found = missing | (
        {f"{engine} {INT8}": why for engine, why in NO_EQUAL.items() if engine not in missing}
        if INT8 in plan.dtypes
        else {}
    )
    return [{"engine": engine, "reason": reason} for engine, reason in found.items()]


def _turned(ways: Sequence[Way], launch: int) -> list[Way]:
    """Another one begins in each launch."""
    first = launch % len(ways)
    return [*ways[first:], *ways[:first]]


def _asks(prompts: Sequence[Prompt], tokens: int, temperature: float) -> list[Ask]:
    return [Ask(each.tokens, tokens, temperature, each.seed) for each in prompts]
