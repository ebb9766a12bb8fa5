"""The command line of `ssd bench check`. Everything heavy is imported when it runs."""

import argparse
import json
import sys
from pathlib import Path

from ssd_serve.cli.flags import Commands

_ENOUGH_PAIRS = 3


def add_check(commands: Commands) -> None:
    """Add the parser `check`."""
    parser = commands.add_parser(
        "check", help="is this checkout slower than the last release? Two minutes, both interleaved"
    )
    parser.add_argument(
        "--base", help="commit to compare with (default: the last tag v*, else this commit's first parent)"
    )
    parser.add_argument("--seconds", type=float, default=100.0, help="time of measuring, without the start")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.set_defaults(run=_run_check)


def _run_check(args: argparse.Namespace) -> int:
    """0: no ratio's interval lies wholly below the bound; 1: one does."""
    from ssd_serve.bench.check.checkouts import both_codes
    from ssd_serve.bench.check.comparison import compare, table

    with both_codes(args.base, _say) as codes:
        result = compare(codes.new, codes.old, seconds=args.seconds, least=_ENOUGH_PAIRS, say=_say)
        print(table(result, codes.name))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result.as_json(codes.name), indent=1) + "\n", encoding="utf-8")
    return 1 if result.slower else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
