"""Figures of the load benchmark: what a set of answers adds up to.

Knows answers, not servers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ssd_serve.bench.load.client import Answer
from ssd_serve.bench.statistics import percentile

_PERCENTILES = (50, 90, 99)
WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Times the limits: which of them is kept says more than whether one is."""


@dataclass(frozen=True, slots=True)
class GoodLimits:
    """What a good answer keeps, in milliseconds: time to the first token, and per token after it.

    MLPerf Inference asks 2000 and 200 of Llama 2 70B as a server, 450 and 40 for interactive use.
    """

    ttft_ms: float
    tpot_ms: float

    def times(self, factor: float) -> "GoodLimits":
        """Limits that are so many times as wide."""
        return GoodLimits(factor * self.ttft_ms, factor * self.tpot_ms)


def is_good(answer: Answer, limits: GoodLimits) -> bool:
    """Whether the answer is whole and within the limits."""
    if answer.error:
        return False
    tpot = answer.tpot_s
    return 1e3 * answer.ttft_s <= limits.ttft_ms and (tpot is None or 1e3 * tpot <= limits.tpot_ms)


def duration(answers: Sequence[Answer]) -> float:
    """Seconds from the first request sent to the last answer's end."""
    return max(answer.ended_s for answer in answers) - min(answer.sent_s for answer in answers)


def throughput(answers: Sequence[Answer]) -> float:
    """Tokens a second over that time; those of answers that failed count too."""
    return sum(answer.tokens for answer in answers) / duration(answers)


def summary(answers: Sequence[Answer], limits: GoodLimits) -> dict[str, object]:
    """Latencies over all whole answers, the share of good ones, and speculation."""
    whole = [answer for answer in answers if not answer.error]
    first = [1e3 * answer.ttft_s for answer in whole]
    later = [1e3 * tpot for answer in whole if (tpot := answer.tpot_s) is not None]
    return {
        "requests": len(answers),
        "failed": len(answers) - len(whole),
        "errors": sorted({answer.error for answer in answers if answer.error})[:3],
        "ttft_ms": _percentiles(first),
        "tpot_ms": _percentiles(later),
        "goodput_shares": {f"{width:g}": _good(answers, limits.times(width)) for width in WIDTHS},
        **speculation_figures(whole),
    }


def _good(answers: Sequence[Answer], limits: GoodLimits) -> float:
    return round(sum(is_good(answer, limits) for answer in answers) / len(answers), 4)


def whole_ms(answers: Sequence[Answer]) -> dict[str, float] | None:
    """Times of whole requests, from when they were due."""
    return _percentiles([1e3 * answer.whole_s for answer in answers if not answer.error])


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {f"p{percent}": round(percentile(values, percent), 2) for percent in _PERCENTILES}


def speculation_figures(answers: Sequence[Answer]) -> dict[str, float | None]:
    """Over all rounds of the answers; None where there is nothing to divide by."""
    told = [answer.speculation for answer in answers]
    rounds = sum(one.num_spec_steps for one in told)
    accepted = sum(one.num_accepted_draft_tokens or 0 for one in told)
    nodes = sum(one.num_draft_tokens or 0 for one in told)
    hits, misses = sum(one.cache_hits or 0 for one in told), sum(one.cache_misses or 0 for one in told)
    return {
        "tokens_per_round": _share(rounds + accepted, rounds),
        "nodes_per_round": _share(nodes, rounds),
        "acceptance": _share(accepted, nodes),
        "hit_rate": _share(hits, hits + misses),
    }


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None
