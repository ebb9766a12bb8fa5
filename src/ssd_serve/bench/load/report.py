"""A result of `ssd bench load` as Markdown tables, and as the panels of its plot.

Knows the shape of the result, and nothing of how it was measured.
"""

from collections.abc import Callable, Mapping, Sequence

from ssd_serve.bench.document import read_as
from ssd_serve.bench.load.cells import mode_name, number, spread
from ssd_serve.bench.load.groups import ALL, SAME
from ssd_serve.bench.load.result import ChunkStepsMs, LoadRatio, LoadResult, LoadRow, Resume
from ssd_serve.bench.load.trace_report import trace_table
from ssd_serve.bench.tables import markdown_table

_MEANING = {
    "real": "the served pair",
    "ballast": "the embedded pair with ballast (the same function at a larger cost)",
    "emulated": "the embedded pair; each forward is stretched by sleeping to the step time of a device "
    "table, everything else is real. Not a measurement of those devices",
}
_SAME = (
    "The same target device: the drafter's stays idle where there is no drafter. sd and ssd "
    "never stop speculating."
)
_ALL = "All devices: where no drafter works beside the target, it has the drafter's as well."
_COLUMNS = ("mode", "tokens/s (quartiles)", "TTFT ms p50 / p90 / p99", "TPOT ms p50 / p90 / p99")
_OPEN_COLUMNS = ("whole request s p50 / p90 / p99", "most at once")


_RATIO_OF = {False: "Throughput", True: "The inverse of the mean time of a whole request"}


def load_tables(result: Mapping[str, object]) -> str:
    """All tables: the same target device, all devices, auto's ratios in both, trace, resumption."""
    found = _converted(result)
    parts: list[str] = []
    for group, title in ((SAME, _SAME), (ALL, _ALL)):
        rows = [row for row in found.results if row.mode in group]
        if {row.mode for row in rows} - {"ssd"}:
            parts.append(f"**{title}** Models: {_MEANING.get(found.plan.setting, '')}.")
            parts += [_closed([row for row in rows if not row.offered])]
            parts += [_ratio_table([each for each in found.ratios if not each.offered], f"{group[-1]}/")]
            parts += [_open([row for row in rows if row.offered], found)]
            parts += [_ratio_table([each for each in found.ratios if each.offered], f"{group[-1]}/")]
    if found.trace:
        parts += ["**Replay of a trace**", trace_table(result)]
    if found.resume:
        parts += [_resume_table(found.resume)]
    return "\n\n".join(part for part in [*parts, _where(found)] if part)


def load_plot(result: Mapping[str, object]) -> str:
    """The closed loop as SVG: tokens a second, and the median time per output token."""
    from ssd_serve.bench.charts import as_svg
    from ssd_serve.bench.load.plot import Panel, plot

    rows = [row for row in _converted(result).results if not row.offered]
    speeds = _lines(rows, lambda row: row.tokens_per_s)
    waits = _lines(rows, lambda row: None if row.tpot_ms is None else row.tpot_ms.p50)
    return as_svg(plot([Panel("tokens a second", speeds), Panel("ms per output token, median", waits)]))


def _converted(result: Mapping[str, object]) -> LoadResult:
    return read_as(LoadResult, result, "ssd bench load")


def _lines(
    rows: Sequence[LoadRow], value: Callable[[LoadRow], float | None]
) -> dict[str, list[tuple[int, float]]]:
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        found = value(row)
        if found is not None:
            lines.setdefault(row.mode, []).append((row.concurrency, found))
    return lines


def _closed(rows: Sequence[LoadRow]) -> str:
    if not rows:
        return ""
    table = markdown_table(("at once", *_columns(rows)), ((row.concurrency, *_cells(row)) for row in rows))
    return f"Closed loop: always so many requests at once.\n\n{table}"


def _open(rows: Sequence[LoadRow], found: LoadResult) -> str:
    if not rows:
        return ""
    best = max(found.capacities, key=found.capacities.__getitem__, default="")
    table = markdown_table(
        ("offered", *_columns(rows), *_OPEN_COLUMNS),
        ((f"{row.offered:g}", *_cells(row), spread(row.whole_ms, 2, 1e-3), row.most_at_once) for row in rows),
    )
    return (
        f"Poisson arrivals, offered as a share of the {found.capacities.get(best, 0.0):.2f} requests/s that "
        f"{mode_name(best)} gave while always enough of them were waiting.\n\n{table}"
    )


def _columns(rows: Sequence[LoadRow]) -> tuple[str, ...]:
    good = f"good at {' / '.join(rows[0].good)} times the limits"
    return (*_COLUMNS, good, "tokens a round", "nodes a round")


def _cells(row: LoadRow) -> tuple[str, ...]:
    """From the mode on."""
    quartiles = row.tokens_per_s_quartiles
    between = f" ({quartiles[0]:.1f} to {quartiles[-1]:.1f})" if quartiles else ""
    failed = f", {row.failed} failed" if row.failed else ""
    return (
        mode_name(row.mode),
        f"{row.tokens_per_s:.1f}{between}",
        spread(row.ttft_ms),
        spread(row.tpot_ms, 1),
        " / ".join(f"{share:.2f}" for share in row.good.values()) + failed,
        number(row.tokens_per_round),
        number(row.nodes_per_round),
    )


def _ratio_table(ratios: Sequence[LoadRatio], prefix: str) -> str:
    """Auto's ratios, a row for each concurrency and a column for each other mode; the best mode is bold."""
    some = [each for each in ratios if each.ratio.startswith(prefix)]
    if not some:
        return ""
    names = list(dict.fromkeys(each.ratio for each in some))
    opened = some[0].offered > 0
    rows: list[tuple[object, ...]] = []
    for load in dict.fromkeys((each.offered, each.concurrency) for each in some):
        here = {each.ratio: each for each in some if (each.offered, each.concurrency) == load}
        cells = [_ratio(here[name]) if name in here else "" for name in names]
        best = next((each for each in here.values() if each.best), None)
        rows.append(
            (
                f"{load[0]:g}" if load[0] else load[1],
                *cells,
                "" if best is None or best.faster is None else best.faster.verdict,
            )
        )
    counts = sorted({each.pairs for each in some})
    told = (
        f"{_RATIO_OF[opened]} of auto over that of another mode: geometric mean of "
        f"{' or '.join(map(str, counts))} pairs with its 95 % interval. "
        "Bold: the best of the other modes, which auto is judged by: better above 1, as good "
        "above 0.97, worse below 1 with all of the interval; else not shown."
    )
    return f"{markdown_table(('offered' if opened else 'at once', *names, 'auto is'), rows)}\n\n{told}"


def _ratio(each: LoadRatio) -> str:
    text = "one pair" if each.faster is None else str(each.faster)
    return f"**{text}**" if each.best else text


def _resume_table(checks: Sequence[Resume]) -> str:
    """One row a check; times from the moment when the load ended, or from the request's first token."""
    head = (
        *("mode", "load", "tokens a chunk under it", "survivor: first accepted guess, longest gap"),
        *("new request: the same", "before the load: the same"),
    )
    rows = (
        (
            mode_name(check.mode),
            check.concurrency,
            number(check.tokens_per_chunk_under_load),
            _resumed(check.survivor_after_burst) if check.outlived_the_burst else "ended before",
            _resumed(check.single_after_burst),
            _resumed(check.single_before_burst),
        )
        for check in checks
    )
    return f"**When the load goes**: ms until a round accepts a guess again.\n\n{markdown_table(head, rows)}"


def _resumed(steps: ChunkStepsMs) -> str:
    return f"{number(steps.speculated_ms, 'never')}, {number(steps.longest_gap_ms)}"


def _where(found: LoadResult) -> str:
    plan, hardware, versions = found.plan, found.hardware, found.versions
    client = max((row.client_cpu_share for row in found.results), default=0.0)
    idle = max((row.idle_servers_cpu_share for row in found.results), default=0.0)
    notes = found.notes
    return (
        f"{plan.requests}, temperature "
        f"{plan.temperature:g}; throughput includes prompts. Good: first token within "
        f"{plan.limits.ttft_ms:g} ms and {plan.limits.tpot_ms:g} ms per token after it. Each mode a launched "
        f"server, {_launches(plan.launches, notes.get('sittings'))}; target on "
        f"{notes.get('target_device')}, drafter on "
        f"{notes.get('draft_device')}, client on {notes.get('client_device')}, where it took up to "
        f"{client:.2f} of a core; the servers that were not measured took up to {idle:.3f}. Measured on "
        f"{hardware.get('cpu')}, {hardware.get('cores')} cores, {hardware.get('memory_gib')} GiB; Python "
        f"{versions.get('python')}, torch {versions.get('torch')}."
    )


def _launches(count: int, sittings: object) -> str:
    """Each sitting starts the servers anew."""
    launches = f"{count} launch{'' if count == 1 else 'es'}"
    return launches if sittings in (None, 1) else f"{launches} in {sittings} sittings"
