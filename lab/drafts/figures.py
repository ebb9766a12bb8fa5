"""What answers and a server's page of metrics tell of drafts. Knows numbers, not how they came about."""

from collections.abc import Sequence
from dataclasses import dataclass

from ssd_serve.bench.metrics_page import by_label, metric
from ssd_serve.bench.peers.client import Sample

_PREFIX = "ssd_spec_decode_num_"
_DEPTHS = 8


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts since a server's start, or of a while."""

    verified: tuple[float, ...] = (0.0,) * _DEPTHS
    """Rounds that verified a node, by depth from 1."""
    accepted: tuple[float, ...] = (0.0,) * _DEPTHS
    hits: float = 0.0
    misses: float = 0.0
    expansions: float = 0.0
    awaited: float = 0.0
    rounds: float = 0.0
    wait_s: float = 0.0
    """That rounds waited for drafts."""

    @classmethod
    def read(cls, page: str) -> "Counters":
        """Of a page of metrics."""
        verified, accepted = (
            by_label(page, f"{_PREFIX}{name}_per_pos_total", "position")
            for name in ("drafts", "accepted_tokens")
        )
        places = [str(depth) for depth in range(_DEPTHS)]
        return cls(
            tuple(verified.get(place, 0.0) for place in places),
            tuple(accepted.get(place, 0.0) for place in places),
            metric(page, "ssd_speculation_cache_hits_total"),
            metric(page, "ssd_speculation_cache_misses_total"),
            metric(page, "ssd_draft_expansions_total"),
            metric(page, "ssd_draft_expansions_awaited_total"),
            metric(page, "ssd_spec_decode_num_drafts_total"),
            metric(page, "ssd_engine_wait_seconds_total"),
        )

    def __sub__(self, other: "Counters") -> "Counters":
        return Counters(
            tuple(one - two for one, two in zip(self.verified, other.verified, strict=True)),
            tuple(one - two for one, two in zip(self.accepted, other.accepted, strict=True)),
            self.hits - other.hits,
            self.misses - other.misses,
            self.expansions - other.expansions,
            self.awaited - other.awaited,
            self.rounds - other.rounds,
            self.wait_s - other.wait_s,
        )

    def told(self) -> dict[str, object]:
        """Shares, and milliseconds; None where there is nothing to take a share of."""
        return {
            "acceptance_by_depth": [
                _share(accepted, verified)
                for accepted, verified in zip(self.accepted, self.verified, strict=True)
            ],
            "ready_share": _share(self.hits, self.hits + self.misses),
            "overlap": _share(self.expansions - self.awaited, self.expansions),
            "wait_ms_per_round": _share(1e3 * self.wait_s, self.rounds),
        }


def figures_of(samples: Sequence[Sample], counted: Counters | None) -> dict[str, object]:
    """Of a way's answers. A round commits one token of the target's own, whoever drafts."""
    tokens = sum(each.tokens - 1 for each in samples)
    accepted = sum(each.accepted for each in samples)
    return {
        "tokens_per_s": round(
            sum(each.tokens for each in samples) / sum(each.whole_s for each in samples), 2
        ),
        "decoding_tokens_per_s": round(
            sum(each.counted for each in samples) / sum(each.decode_s for each in samples), 2
        ),
        "first_s": round(sum(each.first_s for each in samples) / len(samples), 4),
        "tokens_per_round": round(tokens / max(1, tokens - accepted), 3),
        "accepted_share": _share(accepted, sum(each.drafted for each in samples)),
        **(counted.told() if counted is not None else {}),
    }


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None
