"""The command line of `python -m lab.relay`."""

import argparse
import sys
from collections.abc import Sequence

from lab.command import experiment_parser, run_experiment
from ssd_serve.bench.experiment import Report
from ssd_serve.bench.numbers import count

MEASURES = ("lab/relay", "lab/front", "server", "src/ssd_serve/front_messages.py")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser(
        "relay", "what handing on to API workers costs, and what decoding on other threads would bring"
    )
    parser.add_argument("--streams", type=count, default=256, help="requests at once (256)")
    parser.add_argument("--rounds", type=count, default=400, help="reports of each (400)")
    parser.add_argument("--tokens", type=count, default=20_000, help="tokens to decode (20000)")
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    from lab.relay.experiment import run_relay
    from lab.relay.report import table

    return Report(run_relay(args.streams, args.rounds, args.tokens), table)


if __name__ == "__main__":
    sys.exit(main())
