"""The table of `ssd bench ssd-table` in Markdown, with what others published beside it.

Knows the shape of the result, and nothing of how it was measured.
"""

from collections.abc import Mapping

import msgspec

from ssd_serve.bench.document import read_as
from ssd_serve.bench.ssd_table.published import AMD, EQUAL_DEVICES, TABLE, Published
from ssd_serve.bench.statistics import Interval
from ssd_serve.bench.tables import markdown_table

_NAMES = {"ar": "plain (ar)", "sd": "synchronous (sd)", "ssd": "SSD (ssd)"}
_HEAD = (
    *("ranks", "mode", "devices", "tokens/s", "a device", "whole request", "tokens a round"),
    *("SSD is faster by", "AMD published (MI300X)"),
)


class _Row(msgspec.Struct, frozen=True):
    """One server."""

    mode: str
    ranks: int
    devices: int
    tokens_per_s: float
    tokens_per_s_a_device: float
    whole_request_tokens_per_s: float
    tokens_per_round: float | None
    requests: int
    failed: int


class _Ratio(msgspec.Struct, frozen=True):
    """SSD against another server; `faster` is None where it is a single prompt."""

    ranks: int
    against: str
    against_ranks: int
    same_devices: bool
    faster: Interval | None


class _Refused(msgspec.Struct, frozen=True):
    """What could not be measured."""

    way: str
    why: str


class _Plan(msgspec.Struct, frozen=True):
    """What was run."""

    prompts: int
    tokens: int
    temperature: float
    launches: int
    exact: bool


class _Result(msgspec.Struct, frozen=True):
    """What is read of a result."""

    results: list[_Row]
    ratios: list[_Ratio]
    refused: list[_Refused]
    plan: _Plan


def ssd_tables(result: Mapping[str, object]) -> str:
    """Measured, at equal devices, not measured, and published."""
    found = read_as(_Result, result, "ssd bench ssd-table")
    plan = found.plan
    parts = [
        markdown_table(_HEAD, (_cells(row, found) for row in found.results)),
        *(_equal(ratio) for ratio in found.ratios if ratio.ranks != ratio.against_ranks),
        "\n".join(f"- not measured: {one.way}: {one.why}" for one in found.refused),
        f"One user, {plan.prompts} prompts of {plan.tokens} new tokens{'' if plan.exact else ' at most'}, "
        f"temperature {plan.temperature:g}, {plan.launches} launches of every server. Tokens/s are medians "
        "from the first token on, without the prompt. SSD is compared at the same ranks, prompt by prompt: "
        "the mean ratio and its 95 % interval. It has the draft's device more than the others; *a device* "
        "divides by all of them.",
        "**Published by others**, not measured here:",
        markdown_table(
            ("who", "pair", "texts", "ranks", "plain", "synchronous", "SSD", "of plain", "of synchronous"),
            map(_published, TABLE),
        ),
        f"At an equal number of devices (two) AMD gives SSD as {EQUAL_DEVICES:.2f}x synchronous speculation.",
    ]
    return "\n\n".join(part for part in parts if part)


def _cells(row: _Row, found: _Result) -> tuple[object, ...]:
    return (
        row.ranks,
        _NAMES.get(row.mode, row.mode),
        row.devices,
        f"{row.tokens_per_s:.1f}" + (f" ({row.failed} failed)" if row.failed else ""),
        f"{row.tokens_per_s_a_device:.1f}",
        f"{row.whole_request_tokens_per_s:.1f}",
        "" if row.tokens_per_round is None else f"{row.tokens_per_round:.2f}",
        _faster(row, found),
        _amd(row) if row.ranks == AMD.ranks else "",
    )


def _faster(row: _Row, found: _Result) -> str:
    for ratio in found.ratios:
        if (ratio.against, ratio.against_ranks, ratio.ranks) == (row.mode, row.ranks, row.ranks):
            return _told(ratio)
    return ""


def _told(ratio: _Ratio) -> str:
    return "" if ratio.faster is None else f"{ratio.faster}: {ratio.faster.verdict}"


def _amd(row: _Row) -> str:
    figures = {
        "ar": f"{AMD.plain:.1f}, {AMD.of_plain:.2f}x",
        "sd": f"{AMD.sync:.0f}, {AMD.of_sync:.2f}x",
        "ssd": f"{AMD.ssd:.2f}",
    }
    return figures.get(row.mode, "")


def _equal(ratio: _Ratio) -> str:
    other = _NAMES.get(ratio.against, ratio.against)
    ranks = f"{ratio.against_ranks} rank{'s' * (ratio.against_ranks > 1)}"
    return (
        f"- the same number of devices: SSD with {ratio.ranks} against {other} with {ranks}: {_told(ratio)}"
    )


def _published(one: Published) -> tuple[object, ...]:
    return (
        *(one.who, one.pair, one.text, one.ranks, f"{one.plain:.1f}", f"{one.sync:.1f}", f"{one.ssd:.1f}"),
        *(f"{one.of_plain:.2f}x", f"{one.of_sync:.2f}x"),
    )
