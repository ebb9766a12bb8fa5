"""The command line of an experiment: a parser as `ssd` has it, its result file, and the exit codes of its
errors."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssd_serve.bench.document import show
from ssd_serve.cli.flags import Parser
from ssd_serve.cli.main import exit_code


@dataclass(frozen=True, slots=True)
class Report:
    """What an experiment hands over. Without a `text` the result is printed where no file is wanted."""

    result: Mapping[str, object]
    text: str = ""
    code: int = 0


def experiment_parser(name: str, text: str) -> Parser:
    """The parser of `python -m lab.NAME`."""
    return Parser(prog=f"python -m lab.{name}", description=text)


def run_experiment(
    parser: Parser, run: Callable[[argparse.Namespace], Report], argv: Sequence[str] | None = None
) -> int:
    """Parse `argv`, run, show and write what came out, and return the exit code."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")

    def run_and_show(args: argparse.Namespace) -> int:
        report = run(args)
        show(report.result, args.json, report.text)
        return report.code

    return exit_code(lambda: run_and_show(parser.parse_args(argv)), parser.prog)
