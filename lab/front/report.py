"""What a page shows of streams from one front end: a line for each way and load."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from ssd_serve.bench.tables import markdown_table

_CASE = ("loop", "parser", "tokens_per_round", "asked_tokens_per_s")


def front_table(result: Mapping[str, Any]) -> str:
    """Medians over the passes."""
    cases: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for trial in result["trials"]:
        cases.setdefault(tuple(trial[name] for name in _CASE), []).append(trial)
    head = (
        "loop, parser",
        "streams",
        "tokens a round",
        "asked tokens/s",
        "tokens/s",
        "late ms (p50, p99)",
        "core",
    )

    def middle(trials: list[Mapping[str, Any]], name: str) -> float:
        return float(median(trial[name] for trial in trials))

    lines = [
        (
            f"{loop}, {parser}",
            trials[0]["streams"],
            tokens,
            f"{asked:,.0f}",
            f"{middle(trials, 'tokens_per_s'):,.0f}",
            f"{middle(trials, 'late_ms'):.0f}, {middle(trials, 'late_99_ms'):.0f}",
            f"{middle(trials, 'core_used'):.2f}",
        )
        for (loop, parser, tokens, asked), trials in cases.items()
    ]
    return markdown_table(head, lines)
