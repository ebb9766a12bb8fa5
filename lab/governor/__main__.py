"""The command line of `python -m lab.governor`."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

from lab.command import experiment_parser, run_experiment
from ssd_serve.bench.experiment import Report

MEASURES = ("lab/governor", "verifier/planning")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser(
        "governor", "what finding out which layout is best costs, in simulated rounds with known gains"
    )
    parser.add_argument("--seeds", type=int, default=24, help="runs of each load (24)")
    parser.add_argument("--rounds", type=int, default=20000, help="of each run (20000)")
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    from lab.governor.simulation import NOISE, compare, table

    rows = compare(max(1, args.seeds), max(1, args.rounds))
    result = {
        "bench": "governor",
        "seeds": args.seeds,
        "rounds": args.rounds,
        "noise": NOISE,
        "results": [asdict(row) for row in rows],
    }
    return Report(result, lambda _result: table(rows))


if __name__ == "__main__":
    sys.exit(main())
