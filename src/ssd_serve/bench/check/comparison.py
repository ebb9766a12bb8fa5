"""`ssd bench check`: is one state of the code slower than another? Passes of both, taken in turn.

A pass decodes a few prompts plainly and with SSD at temperature 0. Two passes of the two codes over the same
prompts, one directly after the other, make a pair; what is judged is the ratio in each pair, so that a
machine that slows down slows both. Knows neither processes nor git.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

from ssd_serve.base.errors import SsdError
from ssd_serve.bench.statistics import AS_GOOD, Interval, Verdict, ratio_interval
from ssd_serve.bench.tables import text_table

MODES = ("ar", "ssd")


class Code(Protocol):
    """One state of the code, ready to decode."""

    def measure(self, turn: int) -> Mapping[str, float]:
        """Tokens a second of each mode over the prompts of this turn."""
        ...


@dataclass(frozen=True, slots=True)
class Passes:
    """Speeds in tokens/s by mode and pass, of both codes, and the ratios new/old."""

    new: dict[str, list[float]]
    old: dict[str, list[float]]
    ratios: dict[str, Interval]

    @property
    def failing(self) -> dict[str, Verdict]:
        """The modes of which it is not shown that they are at least as good."""
        good = (Verdict.BETTER, Verdict.AS_GOOD)
        return {mode: ratio.verdict for mode, ratio in self.ratios.items() if ratio.verdict not in good}

    def as_json(self, base: str) -> dict[str, object]:
        """For a result file."""
        return {
            "bench": "check",
            "base": base,
            "results": [
                {
                    "mode": mode,
                    "new_tokens_per_s": [round(speed, 2) for speed in self.new[mode]],
                    "old_tokens_per_s": [round(speed, 2) for speed in self.old[mode]],
                    "new": asdict(ratio),
                }
                for mode, ratio in self.ratios.items()
            ],
        }


def compare(
    new: Code,
    old: Code,
    *,
    seconds: float,
    least: int,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> Passes:
    """Pairs of passes until `seconds` have gone by, at least `least`, after one that is not counted."""
    codes = {"new": new, "old": old}
    speeds: dict[str, dict[str, list[float]]] = {name: {mode: [] for mode in MODES} for name in codes}
    for code in codes.values():
        code.measure(0)
    started, turn = clock(), 0
    while turn < least or clock() - started < seconds:
        turn += 1
        order = ("new", "old") if turn % 2 else ("old", "new")
        for name in order:
            for mode, speed in codes[name].measure(turn).items():
                speeds[name][mode].append(speed)
        latest = [f"{mode} {speeds['new'][mode][-1] / speeds['old'][mode][-1]:.2f}" for mode in MODES]
        say(f"pair {turn}: new/old {', '.join(latest)}")
    ratios: dict[str, Interval] = {}
    for mode in MODES:
        pairs = zip(speeds["new"][mode], speeds["old"][mode], strict=True)
        interval = ratio_interval([ahead / behind for ahead, behind in pairs])
        if interval is None:
            raise SsdError("one pair of passes says nothing about spread; measure for longer")
        ratios[mode] = interval
    return Passes(speeds["new"], speeds["old"], ratios)


def table(found: Passes, base: str) -> str:
    """The verdict for people."""
    rows = (
        (
            mode,
            f"{statistics.median(found.new[mode]):.1f}",
            f"{statistics.median(found.old[mode]):.1f}",
            str(ratio),
            ratio.verdict.value,
        )
        for mode, ratio in found.ratios.items()
    )
    told = ", ".join(f"{mode}: {verdict}" for mode, verdict in found.failing.items()) or "no mode is slower"
    return (
        f"this checkout against {base}, temperature 0, {len(found.new[MODES[0]])} interleaved pairs\n"
        f"{text_table(('mode', 'new tok/s', 'old tok/s', 'new/old (95 % interval)', 'new is'), rows)}\n"
        f"{told} (as good: the interval lies above {AS_GOOD:g}; where the noise is too large to show it, "
        "give it more --seconds)"
    )
