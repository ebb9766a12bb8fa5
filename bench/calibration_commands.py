"""The command line of `ssd bench calibration`. Parses arguments and writes files; what is heavy is imported
late."""

import argparse
import json
import sys
from pathlib import Path

from ssd_serve.flags import Commands

_TEMPERATURES = (0.0, 0.7, 1.0)


def add_calibration(commands: Commands) -> None:
    """Add the parser `calibration`."""
    parser = commands.add_parser(
        "calibration", help="reach against what happened, with the embedded pair, in virtual time"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=list(_TEMPERATURES))
    parser.add_argument("--tokens", type=int, default=2000, help="tokens counted at each temperature")
    parser.add_argument("--warm-up", type=int, default=2000, help="tokens before them, not counted")
    parser.add_argument("--table", default="mi300x-70b-1b", help="device table that times the forwards")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the reliability diagram")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from ssd_serve.bench.ablate_pair import embedded_pair
    from ssd_serve.bench.calibration import Plan, run_calibration
    from ssd_serve.bench.calibration_report import calibration_table, draw

    pair, prompts = embedded_pair(args.table)
    plan = Plan(tuple(args.temperatures), tokens=args.tokens, warm_up=args.warm_up)
    result = run_calibration(pair, prompts, plan, lambda text: print(text, file=sys.stderr, flush=True))
    print(calibration_table(result))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.plot is not None:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        args.plot.write_text(draw(result), encoding="utf-8")
    return 0
