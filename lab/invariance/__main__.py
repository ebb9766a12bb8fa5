"""The command line of `python -m lab.invariance`. Heavy imports come when it runs."""

import argparse
import sys
from collections.abc import Sequence

from lab.command import experiment_parser, run_experiment
from ssd_serve.bench.document import say
from ssd_serve.bench.experiment import Report
from ssd_serve.bench.restart import restart_as_worker
from ssd_serve.cli.flags import add_settings_flags, settings_from

MEASURES = ("lab/invariance", "kernels", "models")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser("invariance", "what SSD_BATCH_INVARIANT costs a forward of the target")
    parser.add_argument("--repeats", type=int, default=15)
    add_settings_flags(parser)
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    restart_as_worker()  # this process plays the verifier
    from lab.invariance.experiment import InvariancePlan, run_invariance

    return Report(run_invariance(settings_from(args), InvariancePlan(repeats=args.repeats), say))


if __name__ == "__main__":
    sys.exit(main())
