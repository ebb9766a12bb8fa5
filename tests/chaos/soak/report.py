"""What a soak has found, as figures, as a verdict and as a table for people. Runs nothing."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from ssd_serve.bench.tables import markdown_table
from tests.chaos.soak.processes import Series
from tests.chaos.soak.statistics import Slope, after_warm_up, slope

MAX_MIB_AN_HOUR = 32.0
"""A process leaks when it surely grows faster than this: when the lower end of the interval is above it."""
MIN_HOURS = 0.1
"""Of samples after the warm-up: a slope over less is shown, but judges nobody."""
MAX_DESCRIPTORS_MORE = 8
"""Than after the warm-up: clients that are just connected are no leak."""
_POINTS = 120


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """One process from its start to its end. Memory in MiB; `slope` in MiB an hour, after the warm-up."""

    name: str
    pid: int
    seconds: float
    first_mib: float
    last_mib: float
    max_mib: float
    slope: Slope | None
    descriptors: tuple[int, int]
    """After the warm-up, and last."""
    threads: tuple[int, int]
    course: tuple[tuple[int, float], ...]
    """Memory at some seconds of the run."""


def process_figures(series: Iterable[Series], warm_up_s: float) -> list[ProcessFigures]:
    """Figures of every process that was seen, in order of appearance."""
    figures: list[ProcessFigures] = []
    for each in series:
        start = after_warm_up(each.seconds, warm_up_s)
        first = min(start, len(each.seconds) - 1)
        figures.append(
            ProcessFigures(
                each.name,
                each.pid,
                each.seconds[-1] - each.seconds[0],
                each.memory_mib[first],
                each.memory_mib[-1],
                max(each.memory_mib),
                slope(each.seconds[start:], each.memory_mib[start:]),
                (each.descriptors[first], each.descriptors[-1]),
                (each.threads[first], each.threads[-1]),
                _course(each),
            )
        )
    return figures


class _End(msgspec.Struct, frozen=True):
    held: dict[str, float]
    told: dict[str, float]
    exit_code: int | None
    orphans: list[str]
    leftovers: list[str]


class _Result(msgspec.Struct, frozen=True):
    mode: str
    requests: dict[str, int]
    failed: int
    failures: list[str]
    probes: int
    disturbances: dict[str, int]
    processes: list[ProcessFigures]
    end: _End
    problems: list[str] = []


def _course(series: Series) -> tuple[tuple[int, float], ...]:
    every = max(1, len(series.seconds) // _POINTS)
    points = zip(series.seconds[::every], series.memory_mib[::every], strict=True)
    return tuple((round(seconds), round(mib, 1)) for seconds, mib in points)


def judge(result: Mapping[str, object]) -> list[str]:
    """What is off, in sentences; empty where nothing is."""
    found = msgspec.convert(dict(result), _Result)
    problems = [f"failed: {text}" for text in found.failures]
    if not found.requests:
        problems.append("no request was answered")
    problems += [f"in silence {name} is {value:g}, not 0" for name, value in found.end.held.items() if value]
    if found.end.exit_code != 0:
        problems.append(f"the server's exit code was {found.end.exit_code}, not 0")
    problems += [f"still running: {name}" for name in found.end.orphans]
    problems += [f"left in the run directory: {name}" for name in found.end.leftovers]
    for each in found.processes:
        problems += _process_problems(each)
    return problems


def _process_problems(each: ProcessFigures) -> list[str]:
    problems: list[str] = []
    grown = each.slope
    if grown is not None and grown.hours >= MIN_HOURS and grown.low > MAX_MIB_AN_HOUR:
        problems.append(
            f"{each.name} {each.pid} grows by {grown.value:.0f} MiB an hour "
            f"({grown.low:.0f} to {grown.high:.0f})"
        )
    before, after = each.descriptors
    if after > before + MAX_DESCRIPTORS_MORE:
        problems.append(f"{each.name} {each.pid} has {after} descriptors open, {before} after the warm-up")
    return problems


def soak_table(result: Mapping[str, object]) -> str:
    """The result as Markdown."""
    found = msgspec.convert(dict(result), _Result)
    head = (
        "process",
        "seconds",
        "MiB after warm-up, last, most",
        "MiB an hour (95 %)",
        "descriptors",
        "threads",
    )
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(found.requests.items()))
    done = ", ".join(f"{name} {count}" for name, count in sorted(found.disturbances.items())) or "none"
    told = ", ".join(f"{name} {value:g}" for name, value in found.end.told.items())
    held = ", ".join(f"{name} {value:g}" for name, value in found.end.held.items())
    lines = [
        markdown_table(head, map(_cells, found.processes)),
        "",
        f"- mode {found.mode}; requests: {kinds}; failed: {found.failed}; equal probes: {found.probes}",
        f"- disturbances: {done}",
        f"- in silence: {held}",
        f"- told by the last engine: {told}",
        f"- exit code {found.end.exit_code}, orphans {len(found.end.orphans)}, "
        f"leftovers {len(found.end.leftovers)}",
        "",
        *([f"- PROBLEM: {text}" for text in found.problems] or ["Nothing was off."]),
    ]
    return "\n".join(lines)


def _cells(each: ProcessFigures) -> tuple[str, ...]:
    return (
        f"{each.name} ({each.pid})",
        f"{each.seconds:.0f}",
        f"{each.first_mib:.1f}, {each.last_mib:.1f}, {each.max_mib:.1f}",
        _slope(each.slope),
        f"{each.descriptors[0]}, {each.descriptors[1]}",
        f"{each.threads[0]}, {each.threads[1]}",
    )


def _slope(grown: Slope | None) -> str:
    if grown is None:
        return "too short"
    short = "" if grown.hours >= MIN_HOURS else ", too short to judge"
    return f"{grown.value:+.1f} ({grown.low:+.1f} to {grown.high:+.1f}{short})"
