"""The command line of `python -m lab.drafters`. Everything heavy is imported when it runs."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.command import experiment_parser, run_command


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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    return run_command(parser, _run, argv)


def _run(args: argparse.Namespace) -> int:
    from lab.drafters.crowd import Plan
    from lab.drafters.experiment import run_drafters
    from lab.drafters.report import drafters_table
    from lab.virtual.pair import embedded_draft, embedded_pair
    from ssd_serve.bench.document import write_json
    from ssd_serve.memory import settle_memory

    pair, prompts = embedded_pair(args.table)
    settle_memory()  # as the verifier does
    plan = Plan(tuple(args.drafters), args.requests, args.prompt, args.tokens, args.temperature, args.width)
    result = run_drafters(pair, embedded_draft, prompts, plan, args.table, _say)
    if args.real:
        from lab.drafters.real import run_real_drafters

        real = run_real_drafters(args.real, plan, args.real_table, _say)
        result |= {"real_table": args.real_table, "real": real}
    print(drafters_table(result))
    if args.json is not None:
        write_json(result, args.json)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
