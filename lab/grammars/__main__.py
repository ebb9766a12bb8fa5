"""The command line of `python -m lab.grammars`. Heavy imports come when it runs."""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from lab.command import experiment_parser, run_experiment
from ssd_serve.bench.experiment import Report
from ssd_serve.errors import UserError

MEASURES = ("lab/grammars",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser("grammars", "llguidance and xgrammar: compiling, and masks of a tree's rows")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--vocabulary", type=int, default=65_536, help="tokens of the larger tokenizer")
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    if find_spec("xgrammar") is None:
        raise UserError("python -m lab.grammars needs xgrammar: pip install --no-deps xgrammar==0.2.8")
    from lab.grammars.experiment import run_grammars

    return Report(run_grammars(args.schemas, args.vocabulary))


if __name__ == "__main__":
    sys.exit(main())
