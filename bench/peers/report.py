"""A result of `ssd bench peers` as Markdown and as a bar chart (SVG), and the block that shows both.

Knows the shape of the result file, and nothing of how it was measured.
"""

from collections.abc import Mapping
from html import escape
from pathlib import Path

import msgspec

from ssd_serve.bench.document import read_as, read_json, replace_between
from ssd_serve.bench.peers.ways import BF16, INT8, OURS

BEGIN, END = "<!-- peers:begin -->", "<!-- peers:end -->"
_OUR_COLOUR, _PEER_COLOUR, _TEXT = "#3fa37c", "#a9b1bc", "#1f2328"
_WIDTH, _LEFT, _RIGHT, _BAR, _STEP, _HEAD = 920, 310, 90, 16, 24, 46


class _Row(msgspec.Struct, frozen=True):
    """One way at one temperature."""

    engine: str
    mode: str
    draft: str
    temperature: float
    tokens_per_s: float
    spread: list[float]
    first_token_ms: float
    tokens_per_round: float
    acceptance: float | None
    weights_gb_per_s: float
    share_of_read_speed: float
    dtype: str = BF16
    weights: str = BF16

    @property
    def name(self) -> str:
        """Engine, mode and draft length."""
        return f"{self.engine} {self.mode}" + (f" ({self.draft})" if self.draft else "")

    @property
    def group(self) -> tuple[bool, float]:
        """What it is shown among: weights of as many bits, the same temperature."""
        return self.dtype != BF16, self.temperature


class _Ratio(msgspec.Struct, frozen=True):
    temperature: float
    ours: str
    theirs: str
    median: float
    spread: list[float]
    aim: float | None
    reached: bool | None


class _Failure(msgspec.Struct, frozen=True):
    way: str
    when: str
    reason: str


class _LeftOut(msgspec.Struct, frozen=True):
    engine: str
    reason: str


class _Sizes(msgspec.Struct, frozen=True):
    target_bytes: int
    draft_bytes: int


class _Limits(msgspec.Struct, frozen=True):
    """Sizes in bf16, and in each format with 8 bits a weight."""

    target_bytes: int
    draft_bytes: int
    read_gb_per_s: float
    eight_bits: dict[str, _Sizes] = {}


class _Plan(msgspec.Struct, frozen=True):
    prompts: int
    tokens: int
    launches: int
    cores: int
    dtype: str


class _Result(msgspec.Struct, frozen=True):
    results: list[_Row]
    ratios: list[_Ratio]
    failures: list[_Failure]
    left_out: list[_LeftOut]
    limits: _Limits
    plan: _Plan
    engines: dict[str, str]
    hardware: dict[str, object]
    versions: dict[str, str]


def read_result(path: Path) -> dict[str, object]:
    """The JSON of a result file."""
    return read_json(path, "ssd bench peers")


def markdown(result: Mapping[str, object]) -> str:
    """Tables of speeds and ratios, what failed, what limits the figures, and where they were measured."""
    found = _read(result)
    parts = [_speeds(found), _ratios(found), _failures(found), _limits(found), _where(found)]
    return "\n\n".join(part for part in parts if part)


def replace_block(document: str, text: str) -> str:
    """The document with the text between its markers."""
    return replace_between(BEGIN, END, document, text)


def bar_chart(result: Mapping[str, object]) -> str:
    """One bar a way, grouped by weights and temperature; whiskers from the slowest to the fastest launch."""
    found = _read(result)
    longest = max((row.spread[-1] for row in found.results), default=1.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    parts: list[str] = []
    y = _HEAD
    for eight_bits, temperature in sorted({row.group for row in found.results}):
        rows = [row for row in found.results if row.group == (eight_bits, temperature)]
        heading = f"temperature {temperature:g}, {'weights of 8 bits' if eight_bits else BF16}"
        parts.append(_label(12, y + 12, heading, bold=True))
        y += _STEP
        for row in sorted(rows, key=lambda row: -row.tokens_per_s):
            parts.append(_bar(row, y, scale))
            y += _STEP
        y += _STEP // 2
    title = f"Decoding speed in tokens/s, one request, {found.plan.cores} cores in all"
    parts.insert(0, _label(12, 24, title, bold=True))
    machine = f"{found.hardware.get('cpu')}; whiskers: slowest and fastest of {found.plan.launches} launches"
    parts.append(_label(12, y + 12, machine))
    size = f'width="{_WIDTH}" height="{y + 28}" viewBox="0 0 {_WIDTH} {y + 28}"'
    style = f'font-family="sans-serif" font-size="13" fill="{_TEXT}"'
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{ground}\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _read(result: Mapping[str, object]) -> _Result:
    return read_as(_Result, result, "ssd bench peers")


def _bar(row: _Row, y: int, scale: float) -> str:
    name = row.name if row.dtype == BF16 else f"{row.name}, {row.weights}"
    colour = _OUR_COLOUR if row.engine == OURS else _PEER_COLOUR
    low, high = (_LEFT + value * scale for value in (row.spread[0], row.spread[-1]))
    middle = y + _BAR // 2
    size = f'width="{row.tokens_per_s * scale:.1f}" height="{_BAR}"'
    return "\n".join(
        (
            _label(_LEFT - 8, y + 13, name, anchor="end"),
            f'<rect x="{_LEFT}" y="{y}" {size} fill="{colour}"/>',
            f'<path d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {y + 4}v8M{high:.1f} {y + 4}v8" '
            f'stroke="{_TEXT}" fill="none"/>',
            _label(round(high) + 8, y + 13, f"{row.tokens_per_s:.1f}"),
        )
    )


def _label(x: int, y: int, text: str, *, bold: bool = False, anchor: str = "start") -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


def _speeds(found: _Result) -> str:
    lines = [
        "| engine and mode (draft length) | weights | T | tokens/s (launches) | first token, ms "
        "| tokens a round | accepted drafts | read, GB/s | of read speed |",
        "|" + "---|" * 9,
    ]
    for row in sorted(found.results, key=lambda row: (row.group, -row.tokens_per_s)):
        name = f"**{row.name}**" if row.engine == OURS else row.name
        cells = (
            name,
            row.weights,
            f"{row.temperature:g}",
            f"{row.tokens_per_s:.1f} ({row.spread[0]:.1f} to {row.spread[-1]:.1f})",
            f"{row.first_token_ms:.0f}",
            f"{row.tokens_per_round:.2f}",
            "" if row.acceptance is None else f"{row.acceptance:.2f}",
            f"{row.weights_gb_per_s:.1f}",
            f"{row.share_of_read_speed:.0%}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ratios(found: _Result) -> str:
    lines = ["| ours | against | T | ratio (launches) | aim |", "|---|---|---|---|---|"]
    for ratio in found.ratios:
        aim = "" if ratio.aim is None else f"{ratio.aim:g}: {'reached' if ratio.reached else 'missed'}"
        cells = (
            ratio.ours,
            ratio.theirs,
            f"{ratio.temperature:g}",
            f"{ratio.median:.2f}x ({ratio.spread[0]:.2f} to {ratio.spread[-1]:.2f})",
            aim,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) if found.ratios else ""


def _failures(found: _Result) -> str:
    lines = [f"- failed: {one.way}, {one.when}: {one.reason}" for one in found.failures]
    lines += [f"- not measured: {one.engine}: {one.reason}" for one in found.left_out]
    return "\n".join(lines)


def _limits(found: _Result) -> str:
    limits, best = found.limits, 1e9 * found.limits.read_gb_per_s / found.limits.target_bytes
    eight = "".join(
        f" In {kind} the target's forward reads {sizes.target_bytes / 1e6:.0f} MB, the draft's "
        f"{sizes.draft_bytes / 1e6:.0f} MB."
        for kind, sizes in limits.eight_bits.items()
    )
    return (
        f"What limits these figures: a forward of the target reads {limits.target_bytes / 1e6:.0f} MB of "
        f"weights, one of the draft {limits.draft_bytes / 1e6:.0f} MB, and both cores together read "
        f"{limits.read_gb_per_s:.1f} GB/s from memory. Plain decoding can therefore reach at most {best:.0f} "
        f"tokens/s, and speculation that many times its tokens a round, less what the draft reads.{eight} "
        "*Read* is what a way read of its weights in a second: the target once a round, and the draft once "
        "for each drafted token of a peer. Of this engine only the target's reads are counted: its drafter "
        "runs beside it and computes several nodes in a forward."
    )


def _where(found: _Result) -> str:
    plan, hardware = found.plan, found.hardware
    engines = ", ".join(f"{name} {version}" for name, version in found.engines.items())
    reused = ", in bf16" if INT8 in plan.dtype else ""
    return (
        f"Measured on {hardware.get('cpu')}, {plan.cores} of {hardware.get('cores')} cores, "
        f"{hardware.get('memory_gib')} GiB; {engines}. The same checkpoint (the embedded pair with ballast), "
        f"{plan.prompts} prompts a temperature, {plan.tokens} new tokens each, one request at a time. "
        f"Medians over {plan.launches} interleaved launches of every way, slowest and fastest "
        "in brackets; each peer at the draft length that was its fastest in a short pass before"
        f"{reused}. Timed by one streaming client from the first token to the last; transformers has no "
        "server and is timed in its own process."
    )
