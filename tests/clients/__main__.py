"""The command line of `python -m tests.clients`. Heavy imports come when it runs."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from ssd_serve.bench.document import say
from ssd_serve.bench.experiment import Report
from ssd_serve.bench.extra import need
from tests.chaos.command import experiment_parser, run_experiment

MEASURES = ("lab/clients", "server", "src/ssd_serve/base/messages.py")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser("clients", "software that others wrote talks to a server of ours")
    parser.add_argument("names", nargs="*", help="scripts of lab/clients/scripts; none: all")
    parser.add_argument("--environments", type=Path, help="keep what they are installed in, in this folder")
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    need("python -m tests.clients", "httpx", "transformers")
    from tests.clients.experiment import failed, run_clients, table

    with TemporaryDirectory() as folder:
        result = run_clients(args.names, (args.environments or Path(folder)).resolve(), say)
    return Report(result, table, code=int(failed(result)))


if __name__ == "__main__":
    sys.exit(main())
