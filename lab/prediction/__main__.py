"""The command line of `python -m lab.prediction`. Heavy imports come when it runs."""

import argparse
import sys
from collections.abc import Sequence

from lab.command import experiment_parser, run_experiment
from ssd_serve.bench.document import say
from ssd_serve.bench.experiment import Report

MEASURES = ("lab/prediction", "src/ssd_serve/plan", "verifier", "drafter", "cache", "sampling")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser(
        "prediction", "published speeds of the 70B/1B pair against the device table, and this engine there"
    )
    parser.add_argument("--rounds", type=int, default=240, help="of each simulation (240)")
    parser.add_argument("--seeds", type=int, default=2, help="simulations of each way (2)")
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    from lab.prediction.experiment import SimulationEffort, run_prediction
    from lab.prediction.report import prediction_tables

    result = run_prediction(SimulationEffort(rounds=max(10, args.rounds), seeds=max(1, args.seeds)), say)
    return Report(result, prediction_tables)


if __name__ == "__main__":
    sys.exit(main())
