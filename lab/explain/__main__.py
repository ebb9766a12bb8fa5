"""The command line of `python -m lab.explain`. Everything heavy is imported when it runs."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.command import experiment_parser, run_experiment
from ssd_serve.bench.document import say, write
from ssd_serve.bench.experiment import Report, Result
from ssd_serve.bench.provenance import ENGINE
from ssd_serve.cli.flags import add_settings_flags, settings_from
from ssd_serve.cluster.local.process import worker_environment

MEASURES = ("lab/explain", *ENGINE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser("explain", "the measured cost table, and what the engine decides by it")
    parser.add_argument(
        "--acceptance", type=float, nargs="+", default=[0.5, 0.76, 0.9], help="shares of right first guesses"
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16], help="requests at once")
    parser.add_argument("--at-context", type=int, default=512, help="tokens of each request (512)")
    parser.add_argument("--markdown", type=Path, help="write the page to this file")
    add_settings_flags(parser)
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    """Measure, decide in simulated time, print the page."""
    os.environ.update(worker_environment())  # torch is not imported yet
    from lab.explain.experiment import Situation, explain
    from lab.explain.measurement import measure_pair
    from lab.explain.page import as_json, page

    question = Situation(tuple(args.acceptance), tuple(args.requests), args.at_context)
    question.check()
    pair = measure_pair(settings_from(args), say)
    found = explain(pair, question)

    def text(result: Result) -> str:
        told = page(pair, question, found, result)
        write(told + "\n", args.markdown)
        return told

    return Report(as_json(pair, question, found), text)


if __name__ == "__main__":
    sys.exit(main())
