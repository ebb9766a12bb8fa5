"""A result of `ssd bench peers` as Markdown.

Knows the shape of the result file, and nothing of how it was measured.
"""

from collections.abc import Mapping

import msgspec

from ssd_serve.bench.document import read_as
from ssd_serve.bench.peers.ways import BF16, INT8, OURS
from ssd_serve.bench.tables import markdown_table


class Row(msgspec.Struct, frozen=True):
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


class Result(msgspec.Struct, frozen=True):
    results: list[Row]
    ratios: list[_Ratio]
    failures: list[_Failure]
    left_out: list[_LeftOut]
    limits: _Limits
    plan: _Plan
    engines: dict[str, str]
    hardware: dict[str, object]
    versions: dict[str, str]


def markdown(result: Mapping[str, object]) -> str:
    """Tables of speeds and ratios, what failed, what limits the figures, and where they were measured."""
    found = read(result)
    parts = [_speeds(found), _ratios(found), _failures(found), _limits(found), _where(found)]
    return "\n\n".join(part for part in parts if part)


def read(result: Mapping[str, object]) -> Result:
    """The result as its type."""
    return read_as(Result, result, "ssd bench peers")


_SPEEDS = (
    *("engine and mode (draft length)", "weights", "T", "tokens/s (launches)", "first token, ms"),
    *("tokens a round", "accepted drafts", "read, GB/s", "of read speed"),
)


def _speeds(found: Result) -> str:
    rows = sorted(found.results, key=lambda row: (row.group, -row.tokens_per_s))
    return markdown_table(
        _SPEEDS,
        (
            (
                f"**{row.name}**" if row.engine == OURS else row.name,
                row.weights,
                f"{row.temperature:g}",
                f"{row.tokens_per_s:.1f} ({row.spread[0]:.1f} to {row.spread[-1]:.1f})",
                f"{row.first_token_ms:.0f}",
                f"{row.tokens_per_round:.2f}",
                "" if row.acceptance is None else f"{row.acceptance:.2f}",
                f"{row.weights_gb_per_s:.1f}",
                f"{row.share_of_read_speed:.0%}",
            )
            for row in rows
        ),
    )


def _ratios(found: Result) -> str:
    if not found.ratios:
        return ""
    return markdown_table(
        ("ours", "against", "T", "ratio (launches)", "aim"),
        (
            (
                each.ours,
                each.theirs,
                f"{each.temperature:g}",
                f"{each.median:.2f}x ({each.spread[0]:.2f} to {each.spread[-1]:.2f})",
                "" if each.aim is None else f"{each.aim:g}: {'reached' if each.reached else 'missed'}",
            )
            for each in found.ratios
        ),
    )


def _failures(found: Result) -> str:
    lines = [f"- failed: {one.way}, {one.when}: {one.reason}" for one in found.failures]
    lines += [f"- not measured: {one.engine}: {one.reason}" for one in found.left_out]
    return "\n".join(lines)


def _limits(found: Result) -> str:
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


def _where(found: Result) -> str:
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
