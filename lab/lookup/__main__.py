"""The command line of `python -m lab.lookup`. Heavy imports come when it runs."""

import argparse
import sys
from collections.abc import Sequence

from lab.command import experiment_parser, run_experiment
from ssd_serve.bench.document import say
from ssd_serve.bench.experiment import Report
from ssd_serve.bench.provenance import ENGINE

MEASURES = ("lab/lookup", *ENGINE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser("lookup", "what lookup gives, alone and beside a draft model, by kind of text")
    parser.add_argument("--num-prompts", type=int, default=32, help="of each kind (32)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each (96)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6])
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    from lab.lookup.experiment import run_lookup, table

    return Report(run_lookup(args.num_prompts, args.tokens, args.temperatures, say), table)


if __name__ == "__main__":
    sys.exit(main())
