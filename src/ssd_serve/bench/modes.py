"""`ssd bench modes`: plain decoding, n-gram lookup, synchronous chains and trees, and SSD, in one rotation.
Trees and SSD run with lookup beside their draft model, too.

All ways run on all shares of the devices that they can use: the target on its own device, as in SSD, and on
the drafter's as well, or the draft there. Baselines are tuned on prompts of their own. Knows who is compared
and how it is told; the stage knows how things run.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ssd_serve.bench.modes_result import ModesRow, devices_named
from ssd_serve.bench.prompts import Chosen, Prompt, without_loops
from ssd_serve.bench.rig import EngineWay
from ssd_serve.bench.rotation import next_to, rotate, tune
from ssd_serve.bench.statistics import quartiles, ratio_interval
from ssd_serve.bench.timed_request import TimedRequest

PLAIN, SSD = EngineWay("ar"), EngineWay("ssd")
BESIDE = (SSD, replace(SSD, lookup=True))
"""What runs with a drafter on a device of its own; the others are compared with the last."""
_STEPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
_FAN_OUTS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Share:
    """Devices by their names, and how many they are; `draft` empty: the target's own."""

    target: str
    draft: str
    devices: int

    @property
    def name(self) -> str:
        """For people."""
        return devices_named(self.target, self.draft)


@dataclass(frozen=True, slots=True)
class Entry:
    """A way on a share."""

    way: EngineWay
    share: Share


class ModesStage(Protocol):
    """Where entries run. `alone`: the shares of ways without a drafter that works at the same time."""

    setting: str
    fan_out: int
    beside: Share
    alone: Sequence[Share]

    def run(self, entry: Entry, prompt: Prompt, temperature: float) -> TimedRequest:
        """One request on the entry's own devices."""
        ...


def run_modes(
    stage: ModesStage, chosen: Mapping[float, Chosen], say: Callable[[str], None]
) -> list[ModesRow]:
    """A row for each temperature of `chosen` and each entry; in the end those of SSD."""
    rows: list[ModesRow] = []
    for temperature, texts in chosen.items():
        say(f"{stage.setting}, temperature {temperature:g}: tuning")
        tuned: dict[Entry, dict[str, float]] = {}
        for share in stage.alone:
            if not share.draft:
                tuned[Entry(PLAIN, share)] = {}
            tuned |= dict(_tuned(stage, share, temperature, texts.tuning, say))
        entries = [*tuned, *(Entry(way, stage.beside) for way in BESIDE)]
        say(f"  measuring {len(entries)} ways on {len(texts.prompts)} prompts")
        samples = _samples(stage, entries, texts.prompts, temperature)
        written = {
            f"{entry.way.label} on {entry.share.name}": [sample.tokens for sample in some]
            for entry, some in samples.items()
        }
        kept = without_loops(texts.prompts, written)
        if len(kept) < len(texts.prompts):
            say(f"  {len(kept)} prompts are counted: after the others a way's text is a loop")
        samples = {entry: [some[place] for place in kept] for entry, some in samples.items()}
        ours = samples[entries[-1]]
        for entry, theirs in samples.items():
            rows.append(_row(stage.setting, entry, temperature, theirs, ours, tuned.get(entry, {})))
    return rows


def shapes(mode: str, fan_out: int) -> list[EngineWay]:
    """Where the tuning of a way begins."""
    if mode == "sd-chain":
        return [EngineWay(mode, steps) for steps in (1, 2, 4, 8)]
    if mode == "ngram":
        return [EngineWay(mode, fan_out=fan_out) for fan_out in (1, 4)]
    return [EngineWay(mode, steps, width, fan_out) for steps in (0, 2, 4) for width in (4, 16)]


def neighbours(way: EngineWay) -> Iterator[EngineWay]:
    """One step to either side in each direction of a way's shape."""
    if way.steps:
        yield from (replace(way, steps=steps) for steps in next_to(_STEPS, way.steps))
    if way.mode == "ngram":
        yield from (replace(way, fan_out=fan_out) for fan_out in next_to(_FAN_OUTS, way.fan_out))
    elif way.mode == "sd-tree":
        yield from (replace(way, width=width) for width in next_to(_WIDTHS, way.width))


def _tuned(
    stage: ModesStage, share: Share, temperature: float, prompts: Sequence[Prompt], say: Callable[[str], None]
) -> Iterator[tuple[Entry, dict[str, float]]]:
    """The fastest shape of each baseline, and the tokens/s of all shapes that were tried."""

    def speeds(ways: Sequence[EngineWay], some: Sequence[Prompt]) -> dict[EngineWay, float]:
        found = _samples(stage, [Entry(way, share) for way in ways], some, temperature)
        return {entry.way: _speed(samples) for entry, samples in found.items()}

    for mode in ("sd-chain", "sd-tree") if share.draft else ("ngram", "sd-chain", "sd-tree"):
        best, tried = tune(shapes(mode, stage.fan_out), neighbours, speeds, prompts)
        told = {way.label: round(speed, 1) for way, speed in tried.items()}
        say(f"  on {share.name}: {best.label} of " + ", ".join(f"{way} {told[way]}" for way in told))
        yield Entry(best, share), told
        if mode == "sd-tree":
            yield Entry(replace(best, lookup=True), share), {}


def _samples(
    stage: ModesStage, entries: Sequence[Entry], prompts: Sequence[Prompt], temperature: float
) -> dict[Entry, list[TimedRequest]]:
    return rotate(entries, prompts, lambda entry, prompt: stage.run(entry, prompt, temperature))


def _speed(samples: Sequence[TimedRequest]) -> float:
    return sum(sample.decoded for sample in samples) / sum(sample.seconds for sample in samples)


def _row(
    setting: str,
    entry: Entry,
    temperature: float,
    samples: Sequence[TimedRequest],
    ours: Sequence[TimedRequest],
    tuned: dict[str, float],
) -> ModesRow:
    way, share = entry.way, entry.share
    speeds = [sample.tokens_per_s for sample in samples]
    wall = sum(sample.seconds for sample in samples)
    figures = [sample.figures for sample in samples]
    rounds = max(1, sum(each.rounds for each in figures))
    hits, misses = sum(each.hits for each in figures), sum(each.misses for each in figures)
    drafted = sum(each.drafted for each in figures)
    ratios = [own.tokens_per_s / speed for own, speed in zip(ours, speeds, strict=True)]
    return ModesRow(
        setting=setting,
        mode=way.mode,
        shape=way.label,
        temperature=temperature,
        target=share.target,
        draft=share.draft,
        devices=share.devices,
        requests=len(samples),
        tokens_per_s=round(statistics.median(speeds), 2),
        tokens_per_s_quartiles=[round(value, 2) for value in quartiles(speeds)],
        ssd=None if way == BESIDE[-1] else ratio_interval(ratios),
        tokens_per_round=round(sum(sample.decoded for sample in samples) / rounds, 3),
        acceptance=round(sum(each.accepted for each in figures) / drafted, 3) if drafted else None,
        nodes_per_round=round(drafted / rounds, 2),
        hit_rate=round(hits / max(1, hits + misses), 3) if way != PLAIN else None,
        forward_share=round(sum(sample.forward_s for sample in samples) / wall, 4),
        wait_share=round(sum(sample.wait_s for sample in samples) / wall, 4),
        host_share=round(sum(sample.host_s for sample in samples) / wall, 4),
        tuned=tuned,
    )
