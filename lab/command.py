"""The command line of an experiment: a parser as `ssd` has it, and the exit codes of its errors."""

import argparse
from collections.abc import Callable, Sequence

from ssd_serve.cli.flags import Parser
from ssd_serve.cli.main import exit_code


def experiment_parser(name: str, text: str) -> Parser:
    """The parser of `python -m lab.NAME`."""
    return Parser(prog=f"python -m lab.{name}", description=text)


def run_command(
    parser: Parser, run: Callable[[argparse.Namespace], int], argv: Sequence[str] | None = None
) -> int:
    """Parse `argv`, run, and return the exit code."""
    return exit_code(lambda: run(parser.parse_args(argv)), parser.prog)
