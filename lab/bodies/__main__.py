"""The command line of `python -m lab.bodies`."""

import argparse
import sys
from collections.abc import Sequence

from lab.command import experiment_parser, run_experiment
from ssd_serve.bench.document import say
from ssd_serve.bench.experiment import Report
from ssd_serve.bench.extra import need

MEASURES = ("lab/bodies", "server")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser(
        "bodies", "how long bodies of every kind hold up the front end, and the memory that they take"
    )
    parser.add_argument("only", nargs="*", help="parts of the names of kinds; none: all")
    parser.add_argument("--passes", type=int, default=3, help="of each kind; the worst one is told (3)")
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    need("python -m lab.bodies", "httpx")
    from lab.bodies.experiment import run_bodies, table

    result = run_bodies(args.only, max(1, args.passes), say)
    return Report(result, table)


if __name__ == "__main__":
    sys.exit(main())
