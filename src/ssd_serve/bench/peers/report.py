"""A result of `ssd bench peers` as Markdown.

Knows the shape of the result file, and nothing of how it was measured.
"""

from collections.abc import Mapping, Sequence

from ssd_serve.bench.peers.result import Ratio, Result, read
from ssd_serve.bench.peers.ways import BF16, OURS
from ssd_serve.bench.statistics import Interval
from ssd_serve.bench.tables import markdown_table

_SPEEDS = (
    *("engine and mode (shape)", "weights", "T", "whole request, ms (quartiles)", "first token, ms"),
    *("decoding, tokens/s", "tokens a round", "accepted drafts"),
)
_RATIOS = (
    *("ours", "against", "T", "whole request", "that is", "aim"),
    *("first token", "that is", "decoding", "that is"),
)


def markdown(result: Mapping[str, object]) -> str:
    """Tables of speeds and ratios, what failed, and where it was measured."""
    found = read(result)
    parts = [_speeds(found), _ratios(found.ratios), _failures(found), _where(found)]
    return "\n\n".join(part for part in parts if part)


def _speeds(found: Result) -> str:
    rows = sorted(found.results, key=lambda row: (row.group, row.whole_ms[1]))
    return markdown_table(
        _SPEEDS,
        (
            (
                f"**{row.name}**" if row.engine == OURS else row.name,
                row.weights,
                f"{row.temperature:g}",
                f"{row.whole_ms[1]:.0f} ({row.whole_ms[0]:.0f} to {row.whole_ms[-1]:.0f})",
                f"{row.first_token_ms[1]:.0f}",
                f"{row.decoded_per_s[1]:.1f}",
                f"{row.tokens_per_round:.2f}",
                "" if row.acceptance is None else f"{row.acceptance:.2f}",
            )
            for row in rows
        ),
    )


def _ratios(found: Sequence[Ratio]) -> str:
    if not found:
        return ""
    return markdown_table(
        _RATIOS,
        (
            (
                each.ours,
                each.theirs,
                f"{each.temperature:g}",
                *_judged(each.whole),
                "" if each.aim is None else f"{each.aim:g}: {'reached' if each.reached else 'missed'}",
                *_judged(each.first_token),
                *_judged(each.decoding),
            )
            for each in sorted(found, key=lambda each: (each.dtype != BF16, each.temperature))
        ),
    )


def _judged(interval: Interval | None) -> tuple[str, str]:
    return ("", "too few pairs") if interval is None else (str(interval), interval.verdict.value)


def _failures(found: Result) -> str:
    lines = [f"- not complete: {found.missing} answers are missing"] if found.missing else []
    lines += [f"- failed: {one.way}, {one.when}: {one.reason}" for one in found.failures]
    lines += [f"- not measured: {one.engine}: {one.reason}" for one in found.left_out]
    return "\n".join(lines)


def _where(found: Result) -> str:
    plan, hardware = found.plan, found.hardware
    engines = ", ".join(f"{name} {version}" for name, version in found.engines.items())
    tried = sum(len(each.tried) for each in found.tuning)
    return (
        f"Measured on {hardware.get('cpu')}, {plan.cores} of {hardware.get('cores')} cores, "
        f"{hardware.get('memory_gib')} GiB; {engines}. The same checkpoint (the embedded pair with ballast), "
        f"one request at a time, {plan.prompts} prompts a temperature, {plan.tokens} new tokens each, "
        f"launches of everybody: {plan.launches}, all asked in turn prompt by prompt. Each mode of a peer "
        f"has the shape whose whole requests were the fastest on {plan.tuning_prompts} other prompts, of "
        f"{tried} that were tried: draft length, least confidence, n-gram, threads of target and draft. "
        "Factors say how many times as fast ours is than the peer whose whole requests were the fastest: "
        "geometric means of pairs with their 95 % interval, the wider one of that over prompts and that over "
        "launches. Better: all of it above 1; as good: above 0.97; worse: below 1; else it is not shown. An "
        "aim is reached by the lower end. Timed by one streaming client; transformers has no server and is "
        "timed in its own process."
    )
