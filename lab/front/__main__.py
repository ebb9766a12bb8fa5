"""The command line of `python -m lab.front`."""

import argparse
import sys
from collections.abc import Sequence

from lab.command import experiment_parser, run_experiment
from ssd_serve.bench.document import say
from ssd_serve.bench.experiment import Report
from ssd_serve.bench.extra import need
from ssd_serve.bench.numbers import count, positive

MEASURES = ("lab/front", "server")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser(
        "front", "how many tokens a second a front end streams to many clients at once"
    )
    parser.add_argument("--streams", type=count, default=256, help="clients at once (256)")
    parser.add_argument("--rates", type=positive, nargs="+", default=[5e3, 1e4, 2e4, 3e4, 4e4])
    parser.add_argument("--tokens-per-round", type=count, nargs="+", default=[1, 4])
    parser.add_argument("--seconds", type=positive, default=8.0, help="of each trial (8)")
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), nargs="+", default=["asyncio"])
    parser.add_argument("--parser", choices=("h11", "httptools"), nargs="+", default=["h11"])
    parser.add_argument("--passes", type=count, default=3, help="over all loads (3)")
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    need("python -m lab.front", "httpx", *{"uvloop", "httptools"}.intersection(args.loop + args.parser))
    from lab.front.experiment import run_front, table
    from lab.front.others import StreamLoad
    from lab.front.ways import FrontWay

    loads = [
        StreamLoad(args.streams, tokens, rate, args.seconds)
        for tokens in args.tokens_per_round
        for rate in args.rates
    ]
    ways = [FrontWay(loop, parser) for loop in args.loop for parser in args.parser]
    return Report(run_front(loads, ways, args.passes, say), table)


if __name__ == "__main__":
    sys.exit(main())
