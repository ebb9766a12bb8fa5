"""The command line of `python -m lab.host`. Heavy imports come when it runs."""

import argparse
import sys
from collections.abc import Sequence

from lab.command import experiment_parser, run_experiment
from ssd_serve.bench.document import say
from ssd_serve.bench.experiment import Report
from ssd_serve.bench.extra import need
from ssd_serve.bench.provenance import SERVER
from ssd_serve.bench.restart import restart_as_worker
from ssd_serve.cli.flags import add_settings_flags, settings_from

MEASURES = ("lab/host", *SERVER)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser("host", "what the host adds to a round and to a draft step")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32], help="requests at once")
    parser.add_argument("--drafter-only", action="store_true", help="only the parts of draft steps")
    add_settings_flags(parser)
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    need("python -m lab.host", "httpx")
    restart_as_worker()  # this process plays the verifier
    from lab.host.experiment import run_host

    return Report(run_host(settings_from(args), [] if args.drafter_only else args.batches, say))


if __name__ == "__main__":
    sys.exit(main())
