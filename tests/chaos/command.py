"""The command line of an experiment: a parser as `ssd` has it, and the exit codes of its errors."""

import argparse
import sys
from collections.abc import Callable, Sequence

from ssd_serve.app.cli.flags import Parser
from ssd_serve.app.cli.main import exit_code
from ssd_serve.bench.experiment import Report, add_experiment


def experiment_parser(name: str, text: str) -> Parser:
    """The parser of `python -m lab.NAME`."""
    return Parser(prog=f"python -m lab.{name}", description=text)


def run_experiment(
    parser: Parser,
    run: Callable[[argparse.Namespace], Report],
    measures: Sequence[str],
    argv: Sequence[str] | None = None,
) -> int:
    """Parse `argv`, run what `measures` the code of these paths, and return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    add_experiment(parser, run, measures)

    def parse_and_run() -> int:
        args = parser.parse_args(words)
        code: int = args.run(args, words)
        return code

    return exit_code(parse_and_run, parser.prog)
