"""What `ssd bench load` and a page show of a trace that was replayed. Knows the result, not servers."""

from collections.abc import Mapping

import msgspec

from ssd_serve.bench.document import read_as
from ssd_serve.bench.load.cells import mode_name, number, spread
from ssd_serve.bench.load.result import LoadResult, LoadRow
from ssd_serve.bench.tables import markdown_table


class _Trace(msgspec.Struct, frozen=True):
    """What was sent; shares are of the tokens that the trace asks for."""

    arrivals: int
    context: int
    prompt_tokens_lost_share: float
    output_tokens_lost_share: float


class _Notes(msgspec.Struct, frozen=True):
    trace: _Trace
    device_table: str | None


class _Replayed(msgspec.Struct, frozen=True):
    """What a result has of a trace; `device_table` None: the devices were real."""

    notes: _Notes


def trace_table(result: Mapping[str, object]) -> str:
    """A line for each way; below them what was replayed, where. Raises `UserError` where nothing was."""
    found = read_as(LoadResult, result, "ssd bench load")
    notes = read_as(_Replayed, result, "ssd bench load --trace").notes
    sent = notes.trace
    plan, limits = found.plan, found.plan.limits
    good = f"good at {' / '.join(found.trace[0].good)} times the limits"
    head = (
        *("mode", "tokens/s", "first token s p50 / p90 / p99", "ms a token after it p50 / p90 / p99"),
        *("whole request s p50 / p90 / p99", good, "tokens a round", "nodes a round", "failed"),
    )
    table = notes.device_table
    took = (
        f"; forwards take what the device table {table} says, or longer where this machine does"
        if table
        else ""
    )
    cut = max(sent.prompt_tokens_lost_share, sent.output_tokens_lost_share)
    told = (
        f"{sent.arrivals} arrivals, times multiplied by {plan.time_scale:g} and lengths by "
        f"{plan.length_scale:g}, clipped to a context of {sent.context} tokens (at most {cut:.0%} of the "
        f"tokens are lost); later arrivals are left out. Temperature {plan.temperature:g}. Good: first token "
        f"within {limits.ttft_ms:g} ms and {limits.tpot_ms:g} ms per token after it. One replay of each: no "
        f"intervals{took}. {found.hardware['cpu']}, {found.hardware['cores']} cores."
    )
    return f"{markdown_table(head, map(_cells, found.trace))}\n\n{told}"


def _cells(row: LoadRow) -> tuple[str, ...]:
    return (
        mode_name(row.mode),
        f"{row.tokens_per_s:.1f}",
        spread(row.ttft_ms, 2, 1e-3),
        spread(row.tpot_ms, 1),
        spread(row.whole_ms, 2, 1e-3),
        " / ".join(f"{share:.2f}" for share in row.good.values()),
        number(row.tokens_per_round),
        number(row.nodes_per_round),
        str(row.failed),
    )
