"""The command line of `python -m lab.calibration`. Everything heavy is imported when it runs."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.command import experiment_parser, run_experiment
from ssd_serve.bench.document import say, write
from ssd_serve.bench.experiment import Report, Result
from ssd_serve.bench.extra import need
from ssd_serve.bench.provenance import DRAFTING

_TEMPERATURES = (0.0, 0.7, 1.0)

MEASURES = ("lab/calibration", "lab/virtual", *DRAFTING)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser(
        "calibration", "reach against what happened, with the embedded pair, in virtual time"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=list(_TEMPERATURES))
    parser.add_argument("--tokens", type=int, default=2000, help="tokens counted at each temperature")
    parser.add_argument("--warm-up", type=int, default=2000, help="tokens before them, not counted")
    parser.add_argument("--table", default="mi300x-70b-1b", help="device table that times the forwards")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the reliability diagram")
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    if args.plot is not None:
        need("--plot", "matplotlib")
    from lab.calibration.experiment import CalibrationPlan, run_calibration
    from lab.calibration.report import calibration_table
    from lab.virtual.pair import embedded_pair

    pair, prompts = embedded_pair(args.table)
    plan = CalibrationPlan(tuple(args.temperatures), tokens=args.tokens, warm_up=args.warm_up)

    def text(result: Result) -> str:
        if args.plot is not None:
            from lab.calibration.chart import plot
            from ssd_serve.bench.charts import as_svg

            write(as_svg(plot(result)), args.plot)
        return calibration_table(result)

    return Report(run_calibration(pair, prompts, plan, say), text)


if __name__ == "__main__":
    sys.exit(main())
