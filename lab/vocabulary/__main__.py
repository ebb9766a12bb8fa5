"""The command line of `python -m lab.vocabulary`. Heavy imports come when it runs."""

import argparse
import sys
from collections.abc import Sequence

from lab.command import experiment_parser, run_experiment
from ssd_serve.bench.experiment import Report
from ssd_serve.bench.provenance import SERVER

MEASURES = ("lab/vocabulary", *SERVER)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser("vocabulary", "what a draft loses that has a share of the target's tokens")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--num-prompts", type=int, default=24)
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    from lab.vocabulary.experiment import run_vocabulary

    return Report(run_vocabulary(args.shares, args.temperatures, args.num_prompts))


if __name__ == "__main__":
    sys.exit(main())
