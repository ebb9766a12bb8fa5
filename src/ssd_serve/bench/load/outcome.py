"""What the load benchmark has found: rows by load and mode, pairs, and ratios.

A pair is one set of requests sent to every mode in turn. Knows answers, not servers.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ssd_serve.bench.load.client import Answer
from ssd_serve.bench.load.groups import ALL, SAME
from ssd_serve.bench.load.keys import most_at_once
from ssd_serve.bench.load.result import LoadRatio
from ssd_serve.bench.load.statistics import GoodLimits, duration, is_good, summary, throughput, whole_ms
from ssd_serve.bench.statistics import quartiles, ratio_interval


@dataclass(frozen=True, slots=True)
class Burst:
    """The requests of one pair on one mode. `order` is its turn in the pair; CPU shares are of one core.

    In an open loop `offered` is the share of the capacity at which they arrived, and `concurrency` is 0.
    """

    mode: str
    concurrency: int
    launch: int
    pair: int
    order: int
    answers: tuple[Answer, ...]
    client_cpu_share: float
    server_cpu_share: float
    idle_servers_cpu_share: float
    offered: float = 0.0

    @property
    def load(self) -> tuple[float, int]:
        """What was asked of the server."""
        return self.offered, self.concurrency

    @property
    def speed(self) -> float:
        """What modes are compared by: tokens a second, or where arrivals decide about these, the inverse of
        the mean time of a whole request."""
        if not self.offered:
            return self.tokens_per_s
        return 1 / statistics.fmean(answer.whole_s for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all requests a second, prompts and the last stragglers included."""
        return throughput(self.answers)


def results(bursts: Sequence[Burst], setting: str, limits: GoodLimits) -> list[dict[str, object]]:
    """One row for each load and mode. Throughput is the median burst's."""
    rows: list[dict[str, object]] = []
    for ((offered, concurrency), mode), some in _grouped(bursts).items():
        speeds = [burst.tokens_per_s for burst in some]
        answers = [answer for burst in some for answer in burst.answers]
        seconds = sum(duration(burst.answers) for burst in some)
        good = sum(is_good(answer, limits) for answer in answers)
        rows.append(
            {
                "setting": setting,
                "mode": mode,
                "concurrency": concurrency,
                "offered": offered,
                "tokens_per_s": round(statistics.median(speeds), 2),
                "tokens_per_s_quartiles": [round(value, 2) for value in quartiles(speeds)],
                "goodput_requests_per_s": round(good / seconds, 3),
                **summary(answers, limits),
                "whole_ms": whole_ms(answers),
                "most_at_once": max(most_at_once(burst.answers) for burst in some),
                "bursts": len(some),
                "client_cpu_share": _mean([burst.client_cpu_share for burst in some]),
                "server_cpu_share": _mean([burst.server_cpu_share for burst in some]),
                "idle_servers_cpu_share": _mean([burst.idle_servers_cpu_share for burst in some]),
            }
        )
    return rows


def pairs(bursts: Sequence[Burst], setting: str) -> list[dict[str, object]]:
    """Throughput of every mode for each pair, in the order in which the modes ran."""
    found: dict[tuple[tuple[float, int], int, int], list[Burst]] = {}
    for burst in bursts:
        found.setdefault((burst.load, burst.launch, burst.pair), []).append(burst)
    return [
        {
            "setting": setting,
            "concurrency": concurrency,
            "offered": offered,
            "launch": launch,
            "pair": pair,
            "tokens_per_s": {
                burst.mode: round(burst.tokens_per_s, 2)
                for burst in sorted(some, key=lambda burst: burst.order)
            },
        }
        for ((offered, concurrency), launch, pair), some in found.items()
    ]


def ratios(bursts: Sequence[Burst]) -> list[LoadRatio]:
    """Auto against every other mode of its group, pair by pair; bursts with a failed request are left out."""
    speeds: dict[tuple[float, int], dict[str, dict[int, float]]] = {}
    for burst in bursts:
        if any(answer.error for answer in burst.answers):
            continue
        by_mode = speeds.setdefault(burst.load, {})
        by_mode.setdefault(burst.mode, {})[burst.pair] = burst.speed
    return [
        found
        for *others, auto in (SAME, ALL)
        for load, by_mode in speeds.items()
        for found in _against(
            load, by_mode.get(auto, {}), auto, {m: by_mode[m] for m in others if m in by_mode}
        )
    ]


def _against(
    load: tuple[float, int], own: Mapping[int, float], name: str, others: Mapping[str, Mapping[int, float]]
) -> Iterator[LoadRatio]:
    """One mode's speeds by pair against those of others, of which the best has the highest geometric mean."""
    means = {mode: statistics.geometric_mean(list(speeds.values())) for mode, speeds in others.items()}
    best = max(means, key=means.__getitem__, default=None)
    offered, concurrency = load
    for mode, speeds in others.items():
        found = [speed / speeds[pair] for pair, speed in own.items() if pair in speeds]
        if found:
            yield LoadRatio(
                concurrency=concurrency,
                offered=offered,
                ratio=f"{name}/{mode}",
                best=mode == best,
                pairs=len(found),
                faster=ratio_interval(found),
            )


def _grouped(bursts: Sequence[Burst]) -> dict[tuple[tuple[float, int], str], list[Burst]]:
    """By load and mode; loads in the order in which they were measured."""
    grouped: dict[tuple[tuple[float, int], str], list[Burst]] = {}
    modes = dict.fromkeys((*SAME, *ALL))
    for load in dict.fromkeys(burst.load for burst in bursts):
        for mode in modes:
            some = [burst for burst in bursts if (burst.load, burst.mode) == (load, mode)]
            if some:
                grouped[load, mode] = some
    return grouped


def _mean(values: Sequence[float]) -> float:
    return round(statistics.fmean(values), 4)
