"""Results of benchmarks: a table on stdout, and a JSON file that names code, command and machine."""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from rich.console import Console
from rich.table import Table

from ssd_serve.base.errors import UserError
from ssd_serve.base.settings import SECRETS
from ssd_serve.base.settings_sources import flag_name

_SOURCE = Path(__file__).resolve().parents[1]
_PACKAGES = ("ssd-serve", "torch", "triton", "flashinfer-python", "numpy", "tokenizers", "transformers")
_VECTORS = {
    "amx_bf16": "AMX with bf16",
    "avx512_bf16": "AVX-512 with bf16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "sve": "SVE",
    "asimd": "NEON",
}
"""CPU flags and their names, the widest vectors first."""
_WIDTH = 220


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a benchmark.

    `tables` names lists of rows in `result` and the columns that are printed of each; `notes` are printed
    below the tables.
    """

    result: Mapping[str, object]
    tables: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    notes: Sequence[str] = ()
    exit_code: int = 0


def add_report(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], Report]) -> None:
    """Add `--json` to a benchmark's parser, and make `run` its command."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.set_defaults(run=partial(_run_and_report, run))


def _run_and_report(run: Callable[[argparse.Namespace], Report], args: argparse.Namespace) -> int:
    clock, before = time.monotonic(), os.getloadavg()
    origin = provenance()
    report = run(args)
    origin |= {
        "seconds": round(time.monotonic() - clock, 1),
        "load_averages": {"before": before, "after": os.getloadavg()},
        "machine": machine(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))}
        | {"python": platform.python_version()},
    }
    text = json.dumps({**report.result, "provenance": origin}, indent=1)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text + "\n", encoding="utf-8")
    printed = report_text(report)
    if printed or args.json is None:
        print(printed or text)
    return report.exit_code


def report_text(report: Report) -> str:
    """Format the tables and notes of a report; empty for a report without either."""
    parts: list[str] = []
    for name, columns in report.tables.items():
        rows = report.result.get(name)
        if isinstance(rows, list) and rows:
            parts.append(text_table(columns, ([_cell(row.get(each)) for each in columns] for row in rows)))
    return "\n\n".join([*parts, *(["\n".join(report.notes)] if report.notes else [])])


def _cell(value: object) -> str:
    """Format a figure; intervals are `mean (low to high)`."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        if {"mean", "low", "high"} <= value.keys():
            return f"{value['mean']:.2f} ({value['low']:.2f} to {value['high']:.2f})"
        return ", ".join(f"{name} {_cell(each)}" for name, each in value.items())
    if isinstance(value, list):
        return " / ".join(_cell(each) for each in value)
    return str(value)


def text_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format aligned columns, numbers to the right."""
    body = [[str(cell) for cell in cells] for cells in rows]
    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(head):
        numbers = all(cells[place][:1] in "+-0123456789" for cells in body)
        table.add_column(name, justify="right" if numbers else "left", no_wrap=True)
    for cells in body:
        table.add_row(*cells)
    console = Console(width=_WIDTH, color_system=None, markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def say(text: str) -> None:
    """Print a progress line to stderr."""
    print(text, file=sys.stderr, flush=True)


def need(command: str, *packages: str) -> None:
    """Raise `UserError` before a long measurement if a package of the extra `bench` is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UserError(f"{command} needs {' and '.join(missing)}: pip install 'ssd-serve[bench]'")


def provenance() -> dict[str, object]:
    """Return the state of code and environment before a measurement."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain")),
        "command": " ".join(["ssd", *without_secrets(sys.argv[1:])]),
        "environment": {
            name: "****" if name.removeprefix("SSD_").lower() in SECRETS else _shortened(value)
            for name, value in sorted(os.environ.items())
            if name.startswith(("SSD_", "OMP_", "MKL_", "LD_PRELOAD"))
        },
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def without_secrets(argv: Sequence[str]) -> list[str]:
    """Return a command's words with the values of secret flags masked and absolute paths shortened."""
    secret = {flag_name(name) for name in SECRETS}
    words: list[str] = []
    for place, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if place and argv[place - 1] in secret:
            words.append("****")
        elif equals and flag in secret:
            words.append(f"{flag}=****")
        elif equals and flag.startswith("-"):
            words.append(f"{flag}={_shortened(value)}")
        else:
            words.append(_shortened(word))
    return words


def _shortened(word: str) -> str:
    return Path(word).name if word.startswith("/") else word


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, object]:
    """Return the machine's hardware and system."""
    import torch  # reads the environment that a benchmark sets before it measures

    return {
        "cpu": processor(Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.release()}",
    }


def processor(cpuinfo: str) -> str:
    """Return the processor's name and its widest vectors: one name may cover several generations."""
    lines = (line.split(":", 1) for line in cpuinfo.partition("\n\n")[0].splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in lines}
    name = fields.get("model name") or platform.processor() or platform.machine()
    flags = fields.get("flags", fields.get("Features", "")).split()
    return name + next((f" ({words})" for flag, words in _VECTORS.items() if flag in flags), "")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _git(*words: str) -> str:
    """Return git's output for this project's clone; empty for an installed package or without git."""
    if not (_SOURCE.parents[1] / ".git").exists():
        return ""
    try:
        command = ["git", "-C", str(_SOURCE), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
