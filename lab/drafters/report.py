"""The result of `python -m lab.drafters` as a Markdown table. Knows its shape, not how it came about."""

from collections.abc import Mapping

import msgspec

from ssd_serve.bench.document import read_as
from ssd_serve.bench.tables import markdown_table

WANTED = {2: 1.8, 4: 3.0}
"""Speculation throughput that so many drafters should give, one drafter being 1."""
_HEAD = (
    *("drafters", "candidates/s", "x", "expansions/s", "tokens/s (virtual)", "tokens a round", "hit rate"),
    *("rows a round", "moves", "host us a round", "of it for drafters"),
)


class _Row(msgspec.Struct, frozen=True):
    """One number of drafters."""

    drafters: int
    candidates_per_s: float
    scaling: float
    expansions_per_s: float
    tokens_per_s: float
    tokens_per_round: float
    hit_rate: float
    rows_per_round: float
    moves: int
    host_us_per_round: float
    drafters_host_us_per_round: float


class Real(msgspec.Struct, frozen=True):
    """One number of drafter processes."""

    drafters: int
    expansions_per_s: float
    tokens_per_s: float
    host_us_per_round: float
    overrun_share: float


class _Result(msgspec.Struct, frozen=True):
    rows: list[_Row]
    real: list[Real] = []
    real_table: str = ""


def drafters_table(result: Mapping[str, object]) -> str:
    """The table, and whether what was wanted was reached."""
    read = read_as(_Result, result, "python -m lab.drafters")
    rows = read.rows
    verdicts = [
        f"{row.drafters} drafters: {row.scaling:.2f}x, wanted {WANTED[row.drafters]:g}x: "
        f"{'reached' if row.scaling >= WANTED[row.drafters] else 'missed'}."
        for row in rows
        if row.drafters in WANTED
    ]
    return "\n\n".join([markdown_table(_HEAD, map(_cells, rows)), " ".join(verdicts), *_real(read)])


def _real(read: _Result) -> list[str]:
    if not read.real:
        return []
    rows = (
        (
            row.drafters,
            f"{row.expansions_per_s:.0f}",
            f"{row.expansions_per_s / read.real[0].expansions_per_s:.2f}",
            f"{row.tokens_per_s:.0f}",
            f"{row.host_us_per_round:.0f}",
            f"{row.overrun_share:.2f}",
        )
        for row in read.real
    )
    head = ("drafters", "expansions/s", "x", "tokens/s", "host us a round", "forwards beyond the table")
    told = f"Processes, in real time, forwards stretched to `{read.real_table}`:"
    return [told, markdown_table(head, rows)]


def _cells(row: _Row) -> tuple[object, ...]:
    return (
        row.drafters,
        f"{row.candidates_per_s:.0f}",
        f"{row.scaling:.2f}",
        f"{row.expansions_per_s:.0f}",
        f"{row.tokens_per_s:.0f}",
        f"{row.tokens_per_round:.2f}",
        f"{row.hit_rate:.2f}",
        f"{row.rows_per_round:.1f}",
        row.moves,
        f"{row.host_us_per_round:.0f}",
        f"{row.drafters_host_us_per_round:.0f}",
    )
