"""The command line of `python -m lab.packed`. Heavy imports come when it runs."""

import argparse
import os
import sys
from collections.abc import Sequence

from lab.command import experiment_parser, run_experiment
from ssd_serve.bench.experiment import Report
from ssd_serve.cluster.local.process import worker_environment

MEASURES = ("lab/packed", "kernels")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser("packed", "few-row products: weight reads a second of each kernel")
    parser.add_argument(
        "--dtype", nargs="+", choices=("fp32", "bf16", "fp16", "int8"), default=["bf16", "int8"]
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--matrices", type=int, default=64, help="how many; no cache may hold them (64)")
    parser.add_argument("--repeats", type=int, default=7)
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    os.environ.update(worker_environment())  # as in the engine's processes; torch is not imported yet
    from lab.packed.experiment import PackedPlan, measure, table
    from ssd_serve.kernels.native.library import native_library
    from ssd_serve.settings import Settings

    plan = PackedPlan(args.dtype, args.threads, args.rows, matrices=args.matrices, repeats=args.repeats)
    result = measure(plan, native_library(Settings()))
    return Report(result, table)


if __name__ == "__main__":
    sys.exit(main())
