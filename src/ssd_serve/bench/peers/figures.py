"""The figures of a comparison, computed from its single answers alone."""

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import TypeVar

import msgspec

from ssd_serve.bench.peers.engines import OURS, PeerError
from ssd_serve.bench.statistics import percentile, quartiles, ratio_interval

COLUMNS = (
    *("users", "busy", "kind", "temperature", "mode", "answers", "whole_s", "first_ms", "tokens_per_s"),
    "repeated",
)
RATIO_COLUMNS = ("users", "busy", "kind", "temperature", "ours", "best_peer", "pairs", "whole", "verdict")
ALL = "all"
_STALL_S, _STALLED_PERCENT, _FEWEST = 0.2, 75, 8

Key = TypeVar("Key", bound=Hashable)


class AnswerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A single answer. `group`: the requests that were sent together; `order`: the engine's place in its turn.

    `waited_s`: until all engines were idle; `repeated`: share of the text's 8-grams that occurred before in it.
    """

    sitting: int
    users: int
    busy: str
    kind: str
    prompt: str
    temperature: float
    group: str
    order: int
    engine: str
    mode: str
    shape: str
    seed: int
    prompt_tokens: int
    waited_s: float
    first_s: float
    whole_s: float
    tokens: int
    repeated: float
    text: str

    @property
    def name(self) -> str:
        """Engine and mode."""
        return f"{self.engine} {self.mode}"

    @property
    def case(self) -> tuple[int, str, str, float]:
        """The answers that are compared with one another."""
        return self.users, self.busy, self.kind, self.temperature


def grouped(rows: Iterable[AnswerRow], key: Callable[[AnswerRow], Key]) -> dict[Key, list[AnswerRow]]:
    """Return the rows by a key, in the order in which the keys first occur."""
    found: dict[Key, list[AnswerRow]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def figures(rows: Sequence[AnswerRow]) -> dict[str, list[dict[str, object]]]:
    """Return the rows of both tables. Raises `PeerError` if an engine stalled on a part of its requests."""
    for (name, *_), some in grouped(rows, lambda row: (row.name, row.users, row.busy)).items():
        if some[0].users == 1 and some[0].busy == "none":
            _refuse_stalls(name, some)
    ratios = [
        ratio
        for (users, busy), some in grouped(rows, lambda row: (row.users, row.busy)).items()
        for ratio in _ratios({"users": users, "busy": busy}, some)
    ]
    cases = grouped(rows, lambda row: (row.case, row.name))
    return {"results": [_result(some) for some in cases.values()], "ratios": ratios}


def _refuse_stalls(name: str, rows: Sequence[AnswerRow]) -> None:
    """Raise `PeerError` if a quarter of the first tokens come late, by more than their prompts' lengths explain."""
    if len(rows) < _FEWEST:
        return
    slopes = [
        (one.first_s - other.first_s) / (one.prompt_tokens - other.prompt_tokens)
        for one, other in combinations(rows, 2)
        if one.prompt_tokens != other.prompt_tokens
    ]
    slope = statistics.median(slopes) if slopes else 0.0
    rest = [row.first_s - slope * row.prompt_tokens for row in rows]
    late = percentile(rest, _STALLED_PERCENT) - statistics.median(rest)
    if late > _STALL_S:
        raise PeerError(
            f"{name} needed {late:.2f} s more than usual for a quarter of its first tokens: something disturbed "
            "it, so there is no result; measure again on an idle machine, into another file"
        )


def _speed(rows: Iterable[AnswerRow]) -> float:
    """Return the tokens a second of whole requests."""
    some = list(rows)
    return sum(row.tokens for row in some) / sum(row.whole_s for row in some)


def _result(rows: Sequence[AnswerRow]) -> dict[str, object]:
    users, busy, kind, temperature = rows[0].case
    return {
        "users": users,
        "busy": busy,
        "kind": kind,
        "temperature": temperature,
        "mode": rows[0].name,
        "shape": " or ".join(sorted({row.shape for row in rows})),
        "answers": len(rows),
        "whole_s": round(statistics.median(row.whole_s for row in rows), 3),
        "first_ms": quartiles([1e3 * row.first_s for row in rows]),
        "tokens_per_s": round(_speed(rows), 2),
        "repeated": round(statistics.mean(row.repeated for row in rows), 3),
    }


def _ratios(same: Mapping[str, object], rows: Sequence[AnswerRow]) -> list[dict[str, object]]:
    """Return how many times as fast our modes are as the best peer: of each case, and over all kinds."""
    found: list[dict[str, object]] = []
    for temperature, warm in grouped(rows, lambda row: row.temperature).items():
        pooled: dict[str, list[float]] = {}
        for kind, some in grouped(warm, lambda row: row.kind).items():
            modes = grouped(some, lambda row: row.name)
            peers = {name: each for name, each in modes.items() if each[0].engine != OURS}
            if not peers:
                continue
            best = max(peers, key=lambda name: _speed(peers[name]))
            for name, ours in modes.items():
                if name not in peers:
                    ratios = pairs(ours, peers[best])
                    pooled[name] = pooled.get(name, []) + ratios
                    found.append({**same, **_ratio(kind, temperature, name, best, ratios)})
        for name, ratios in pooled.items():
            found.append({**same, **_ratio(ALL, temperature, name, "the best of each kind", ratios)})
    return found


def _ratio(kind: str, temperature: float, ours: str, best: str, ratios: Sequence[float]) -> dict[str, object]:
    interval = ratio_interval(ratios)
    return {
        "kind": kind,
        "temperature": temperature,
        "ours": ours,
        "best_peer": best,
        "pairs": len(ratios),
        "whole": None if interval is None else asdict(interval),
        "verdict": None if interval is None else interval.verdict,
    }


def pairs(ours: Sequence[AnswerRow], theirs: Sequence[AnswerRow]) -> list[float]:
    """Return the ratio of the whole times of each group that both answered in the same sitting.

    Requests that run together are not independent of one another, so a group is one pair.
    """
    mine, others = (grouped(rows, lambda row: (row.sitting, row.group)) for rows in (ours, theirs))
    return [
        statistics.geometric_mean([row.whole_s for row in others[key]])
        / statistics.geometric_mean([row.whole_s for row in mine[key]])
        for key in mine
        if key in others
    ]
