"""The command line of `python -m lab.ablate`. Everything heavy is imported when it runs."""

import argparse
import sys
from collections.abc import Sequence

from lab.command import experiment_parser, run_experiment
from ssd_serve.bench.document import say
from ssd_serve.bench.experiment import Report
from ssd_serve.bench.numbers import count, positive_or_zero
from ssd_serve.bench.provenance import DRAFTING

_TEMPERATURES = (0.0, 0.6, 1.0)

MEASURES = ("lab/ablate", "lab/virtual", "bench/rotation.py", *DRAFTING)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser(
        "ablate", "ways of growing and of choosing at the same draft budget, in virtual time"
    )
    parser.add_argument("--temperatures", type=positive_or_zero, nargs="+", default=list(_TEMPERATURES))
    parser.add_argument("--prompts", type=count, default=64, help="prompts of each way")
    parser.add_argument("--width", type=count, default=32, help="rows of a draft step")
    parser.add_argument("--table", default="mi300x-70b-1b", help="device table that times the forwards")
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    from lab.ablate.experiment import AblationPlan, run_ablation
    from lab.ablate.report import ablation_table
    from lab.virtual.pair import embedded_pair

    pair, prompts = embedded_pair(args.table)
    plan = AblationPlan(tuple(args.temperatures), args.prompts, width=args.width)
    result = run_ablation(pair, prompts, plan, say)
    return Report(result, ablation_table)


if __name__ == "__main__":
    sys.exit(main())
