"""The command line of `python -m lab.drafters`. Everything heavy is imported when it runs."""

import argparse
import sys
from collections.abc import Sequence

from lab.command import experiment_parser, run_experiment
from ssd_serve.bench.document import say
from ssd_serve.bench.experiment import Report
from ssd_serve.bench.provenance import ENGINE

MEASURES = ("lab/drafters", "lab/virtual", *ENGINE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser("drafters", "what more drafters give a crowd, in virtual time")
    parser.add_argument("--drafters", type=int, nargs="+", default=[1, 2, 4], help="numbers of drafters")
    parser.add_argument("--requests", type=int, default=16, help="requests that run at once")
    parser.add_argument("--prompt", type=int, default=24, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each request")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--width", type=int, default=32, help="rows of a draft step")
    parser.add_argument("--table", default="mi300x-70b-1b", help="device table that times the forwards")
    parser.add_argument(
        "--real", type=int, nargs="+", default=[], help="numbers of drafter processes, in real time"
    )
    parser.add_argument(
        "--real-table", default="mi300x-70b-1b*16", help="device table for them: this machine computes"
    )
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    from lab.drafters.crowd import CrowdPlan
    from lab.drafters.experiment import run_drafters
    from lab.drafters.report import drafters_table
    from lab.virtual.pair import embedded_draft, embedded_pair
    from ssd_serve.memory import settle_memory

    pair, prompts = embedded_pair(args.table)
    settle_memory()  # as the verifier does
    plan = CrowdPlan(
        tuple(args.drafters), args.requests, args.prompt, args.tokens, args.temperature, args.width
    )
    result = run_drafters(pair, embedded_draft, prompts, plan, args.table, say)
    if args.real:
        from lab.drafters.real import run_real_drafters

        real = run_real_drafters(args.real, plan, args.real_table, say)
        result |= {"real_table": args.real_table, "real": real}
    return Report(result, drafters_table)


if __name__ == "__main__":
    sys.exit(main())
