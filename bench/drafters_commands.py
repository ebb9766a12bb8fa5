"""The command line of `ssd bench drafters`. Parses arguments and writes files; heavy imports come late."""

import argparse
import sys
from pathlib import Path

from ssd_serve.flags import Commands


def add_drafters(commands: Commands) -> None:
    """Add the parser `drafters`."""
    parser = commands.add_parser("drafters", help="what more drafters give a crowd, in virtual time")
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
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from ssd_serve.bench.ablate_pair import embedded_draft, embedded_pair
    from ssd_serve.bench.document import write_json
    from ssd_serve.bench.drafters import run_drafters
    from ssd_serve.bench.drafters_crowd import Plan
    from ssd_serve.bench.drafters_report import drafters_table
    from ssd_serve.memory import settle_memory

    pair, prompts = embedded_pair(args.table)
    settle_memory()  # as the verifier does
    plan = Plan(tuple(args.drafters), args.requests, args.prompt, args.tokens, args.temperature, args.width)
    result = run_drafters(pair, embedded_draft, prompts, plan, args.table, _say)
    if args.real:
        from ssd_serve.bench.drafters_real import run_real_drafters

        real = run_real_drafters(args.real, plan, args.real_table, _say)
        result |= {"real_table": args.real_table, "real": real}
    print(drafters_table(result))
    if args.json is not None:
        write_json(result, args.json)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
