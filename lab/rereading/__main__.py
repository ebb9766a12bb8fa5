"""The command line of `python -m lab.rereading`. Heavy imports come when it runs."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.command import experiment_parser, run_experiment
from ssd_serve.bench.document import say
from ssd_serve.bench.experiment import Report
from ssd_serve.bench.provenance import DRAFTING

MEASURES = ("lab/rereading", "lab/virtual", *DRAFTING)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser(
        "rereading", "whether a head's guesses below a right token are kept or made again, in virtual time"
    )
    parser.add_argument("--head", type=Path, help="an EAGLE-3 head of the embedded target (the embedded one)")
    parser.add_argument(
        "--layout", choices=("beside", "inline"), default="beside", help="of the head (beside)"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--prompts", type=int, default=32, help="at each temperature (32)")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of each (48)")
    parser.add_argument("--table", default="mi300x-70b-1b", help="device table that times the forwards")
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    from lab.rereading.experiment import RereadingPlan, embedded_head, run_rereading, table

    headed, prompts = embedded_head(args.table, args.head)
    plan = RereadingPlan(args.layout, tuple(args.temperatures), args.prompts, args.tokens)
    return Report(run_rereading(headed, prompts, plan, say), table)


if __name__ == "__main__":
    sys.exit(main())
