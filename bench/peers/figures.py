"""The figures of the comparison: medians and spread over launches, ratios, and what limits them.

Pure functions of samples; knows no process and no clock.
"""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ssd_serve.bench.peers.client import Sample
from ssd_serve.bench.peers.ways import BF16, DTYPES, LLAMA, OURS, PLAIN, TRANSFORMERS, VLLM, Way

_CHAINS = (LLAMA, VLLM, TRANSFORMERS)
_AUTO_AIMS = {0.0: 1.2, 1.0: 1.3}
_PLAIN_AIM = 0.95


@dataclass(frozen=True, slots=True)
class Launch:
    """All samples of one way at one temperature in one launch; `number` counts rounds of launches."""

    way: Way
    temperature: float
    number: int
    samples: tuple[Sample, ...]

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed over all prompts."""
        return sum(one.counted for one in self.samples) / sum(one.decode_s for one in self.samples)


@dataclass(frozen=True, slots=True)
class Weights:
    """What a forward reads, in bytes, and how fast all cores together can read memory, in bytes a second."""

    target: int
    draft: int
    read_per_s: float


def wrong_speculation(way: Way, samples: Iterable[Sample]) -> str | None:
    """Why these samples are not of the mode that they should be; None: they are."""
    found = list(samples)
    drafted, accepted = sum(one.drafted for one in found), sum(one.accepted for one in found)
    if way.speculates and not drafted:
        return "it drafted nothing: it does not speculate"
    if way.speculates and not accepted:
        return "none of its drafts was accepted"
    if way.speculates is False and drafted:
        return "it drafted although it should decode plainly"
    return None


def rows(launches: Sequence[Launch], weights: Mapping[str, Weights]) -> list[dict[str, object]]:
    """One row for each way and temperature, by temperature and in the order of first appearance.

    `weights` has an entry for each format that the ways store weights in.
    """
    groups: dict[tuple[float, Way], list[Launch]] = {}
    for launch in launches:
        groups.setdefault((launch.temperature, launch.way), []).append(launch)
    ordered = sorted(groups.items(), key=lambda item: item[0][0])
    return [_row(way, temperature, found, weights[way.weights]) for (temperature, way), found in ordered]


def _row(way: Way, temperature: float, launches: Sequence[Launch], weights: Weights) -> dict[str, object]:
    samples = [sample for launch in launches for sample in launch.samples]
    speeds = [launch.tokens_per_s for launch in launches]
    tokens, drafted = sum(one.tokens for one in samples), sum(one.drafted for one in samples)
    accepted = sum(one.accepted for one in samples)
    target_rounds = max(1, tokens - accepted)
    speed = statistics.median(speeds)
    chain = drafted / target_rounds if way.engine in _CHAINS else 0.0
    read = weights.target + chain * weights.draft
    read_per_s = speed / (tokens / target_rounds) * read
    return {
        "engine": way.engine,
        "mode": way.mode,
        "draft": way.shape,
        "dtype": way.dtype,
        "weights": way.weights,
        "temperature": temperature,
        "tokens_per_s": round(speed, 2),
        "spread": [round(min(speeds), 2), round(max(speeds), 2)],
        "launches": [round(value, 2) for value in speeds],
        "first_token_ms": round(1e3 * statistics.median(one.first_s for one in samples), 1),
        "tokens_per_round": round(tokens / target_rounds, 3),
        "drafted_per_round": round(drafted / target_rounds, 2),
        "acceptance": round(accepted / drafted, 3) if drafted else None,
        "weights_gb_per_s": round(read_per_s / 1e9, 2),
        "share_of_read_speed": round(read_per_s / weights.read_per_s, 3),
        "requests": len(samples),
    }


def fastest(ways: Mapping[Way, Sequence[Launch]]) -> Way | None:
    """The way with the highest median speed."""
    speeds = {
        way: statistics.median(one.tokens_per_s for one in found) for way, found in ways.items() if found
    }
    return max(speeds, key=speeds.__getitem__, default=None)


def ratios(launches: Sequence[Launch]) -> list[dict[str, object]]:
    """This engine against the fastest way of any peer, and plain decoding against llama.cpp's.

    Only ways with weights of as many bits are compared; aims are set for bf16. The launches of one round
    stand side by side: noise of the machine that lasts longer cancels.
    """
    found: list[dict[str, object]] = []
    temperatures = sorted({launch.temperature for launch in launches})
    for dtype, temperature in itertools.product(DTYPES, temperatures):
        here = _by_way([one for one in launches if one.temperature == temperature and one.way.dtype == dtype])
        peers = {way: theirs for way, theirs in here.items() if way.engine != OURS}
        best = fastest(peers)
        plain = Way(LLAMA, PLAIN, dtype=dtype)
        aims = {"auto": _AUTO_AIMS.get(temperature), "ar": _PLAIN_AIM} if dtype == BF16 else {}
        if best is not None:
            for mode in ("auto", "ssd", "sd", "ar"):
                aim = None if mode == "ar" and best != plain else aims.get(mode)
                found += _ratio(here, temperature, Way(OURS, mode, dtype=dtype), best, aim)
        if best != plain:
            found += _ratio(here, temperature, Way(OURS, "ar", dtype=dtype), plain, aims.get("ar"))
    return found


def _by_way(launches: Iterable[Launch]) -> dict[Way, list[Launch]]:
    found: dict[Way, list[Launch]] = {}
    for launch in launches:
        found.setdefault(launch.way, []).append(launch)
    return found


def _ratio(
    here: Mapping[Way, Sequence[Launch]], temperature: float, ours: Way, theirs: Way, aim: float | None
) -> list[dict[str, object]]:
    """One ratio, or none where the two have no round of launches in common."""
    speeds = {launch.number: launch.tokens_per_s for launch in here.get(theirs, ())}
    pairs = [
        launch.tokens_per_s / speeds[launch.number]
        for launch in here.get(ours, ())
        if launch.number in speeds
    ]
    if not pairs:
        return []
    median = statistics.median(pairs)
    return [
        {
            "dtype": ours.dtype,
            "temperature": temperature,
            "ours": ours.label,
            "theirs": theirs.label,
            "median": round(median, 3),
            "spread": [round(min(pairs), 3), round(max(pairs), 3)],
            "aim": aim,
            "reached": None if aim is None else median >= aim,
        }
    ]
