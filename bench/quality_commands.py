"""The command lines of `ssd bench quality` and `ssd bench check`. Heavy imports come when one runs."""

import argparse
import json
import sys
from pathlib import Path

from ssd_serve.errors import UserError
from ssd_serve.flags import Commands
from ssd_serve.settings import EMBEDDED

_DTYPES = ("fp32", "bf16", "fp16", "int8")
_ENOUGH_PAIRS = 3


def add_quality(commands: Commands) -> None:
    """Add the parser `quality`."""
    parser = commands.add_parser("quality", help="what a dtype costs on held-out text; nothing is timed")
    parser.add_argument(
        "--target", default=EMBEDDED, help="a model folder with a held_out.json, or 'embedded'"
    )
    parser.add_argument("--positions", type=int, default=60_000, help="least held-out positions to score")
    parser.add_argument(
        "--dtypes", nargs="+", choices=_DTYPES, default=["fp32", "bf16", "int8"], help="first: the reference"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.set_defaults(run=_run_quality)


def _run_quality(args: argparse.Namespace) -> int:
    from ssd_serve.bench.quality import measure_quality, table
    from ssd_serve.models.hub import resolve_model

    if args.positions < 1:
        raise UserError("--positions must be at least 1")
    result = measure_quality(
        resolve_model(args.target, "target"),
        positions=args.positions,
        dtypes=tuple(dict.fromkeys(args.dtypes)),
        say=_say,
    )
    print(table(result))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


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
