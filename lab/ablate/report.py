"""The result of `python -m lab.ablate` as a Markdown table. Knows its shape, not how it came about."""

from collections.abc import Mapping

import msgspec

from ssd_serve.bench.document import read_as
from ssd_serve.bench.statistics import Interval
from ssd_serve.bench.tables import markdown_table

_HEAD = (
    *("T", "growth", "choice", "hit rate", "ready depth", "tokens a round", "tokens/s (virtual)"),
    *("the live tree is faster by", "that is", "verified nodes", "draft steps", "rows a step", "shape"),
)
GROWTHS = {
    "best-first": "best-first, live tree",
    "best-first-synchronous": "best-first, in turns",
    "chain": "chain, in turns",
    "uniform-tree": "uniform tree, thrown away",
    "uniform-table": "outcome table, uniform",
    "geometric-table": "outcome table, geometric",
}
"""Ways to grow, for people."""
_NAMES = {**GROWTHS, "shared-noise": "shared noise", "rejection": "rejection sampling"}


class _Row(msgspec.Struct, frozen=True):
    """One way at one temperature."""

    temperature: float
    growth: str
    choice: str
    shape: str
    prompts: int
    tokens: int
    hit_rate: float
    ready_depth: float
    tokens_per_round: float
    tokens_per_s: float
    verified_per_round: float
    draft_steps_per_round: float
    rows_per_draft_step: float
    live: Interval | None = None
    """Tokens/s of the live tree under shared noise over these, prompt by prompt."""


class _Result(msgspec.Struct, frozen=True):
    results: list[_Row]
    time: str
    plain_tokens_per_s: float


def ablation_table(result: Mapping[str, object]) -> str:
    """One line for each temperature and way, and what time means."""
    found = read_as(_Result, result, "python -m lab.ablate")
    tokens = min((row.tokens for row in found.results), default=0)
    told = (
        f"Time is {found.time}. Plain decoding would give {found.plain_tokens_per_s:g} tokens/s. A hit: "
        "something was drafted below the root when the round began. Draft steps: those of a round, the same "
        "device for all; a thrown-away tree can use it only while the verifier waits. At temperature 0 "
        "rejection sampling accepts what shared noise accepts; elsewhere it draws texts of its own, and "
        f"those that nearly loop are not counted. At least {tokens} tokens a line."
    )
    return f"{markdown_table(_HEAD, map(_cells, found.results))}\n\n{told}"


def _cells(row: _Row) -> tuple[str, ...]:
    return (
        f"{row.temperature:g}",
        _NAMES.get(row.growth, row.growth),
        _NAMES.get(row.choice, row.choice) if row.temperature > 0 else "greedy",
        f"{row.hit_rate:.2f}",
        f"{row.ready_depth:.2f}",
        f"{row.tokens_per_round:.2f}",
        f"{row.tokens_per_s:.1f}",
        *(("", "") if row.live is None else (str(row.live), row.live.verdict.value)),
        f"{row.verified_per_round:.1f}",
        f"{row.draft_steps_per_round:.1f}",
        f"{row.rows_per_draft_step:.1f}",
        row.shape,
    )
