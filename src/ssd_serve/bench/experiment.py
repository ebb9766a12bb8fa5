"""An experiment's way from a command line to its result file, which says where every result comes from.

Knows neither what is measured nor how. All commands of `ssd bench` and of the laboratory that write results
go this way.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ssd_serve.base.errors import UserError
from ssd_serve.bench.document import show
from ssd_serve.bench.numbers import positive
from ssd_serve.bench.provenance import Start

Result = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Report:
    """What an experiment hands over. Its `text` is made of the result as it is written, with hardware and
    versions; without one the result is printed where no file is wanted."""

    result: Result
    text: Callable[[Result], str] | None = None
    code: int = 0


def add_experiment(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], Report], measures: Sequence[str]
) -> None:
    """Make this parser's command an experiment, which `measures` the code of these paths."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.set_defaults(run=partial(run_experiment, run, parser.prog, tuple(measures)))


def add_sittings(parser: argparse.ArgumentParser) -> None:
    """The flags of an experiment that can be measured in several sittings."""
    parser.add_argument(
        "--work", type=Path, help="keep what is measured in this folder: the same command goes on from it"
    )
    parser.add_argument(
        "--minutes", type=positive, help="end after so long; needs --work, to go on later with what there is"
    )


def check_sittings(args: argparse.Namespace) -> None:
    """Raise `UserError` for a sitting of which nothing would stay."""
    if args.minutes and args.work is None:
        raise UserError("--minutes needs --work, or what has been measured is lost")


def run_experiment(
    run: Callable[[argparse.Namespace], Report],
    program: str,
    measures: Sequence[str],
    args: argparse.Namespace,
    argv: Sequence[str] | None = None,
) -> int:
    """Measure, say where it comes from, show and write it; returns the exit code."""
    words = sys.argv[len(program.split()) :] if argv is None else argv
    start = Start.here(program, words, measures)
    report = run(args)
    result = {**report.result, **start.provenance()}
    show(result, args.json, report.text)
    return report.code
