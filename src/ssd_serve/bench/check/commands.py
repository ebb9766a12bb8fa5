"""The command line of `ssd bench check`. Everything heavy is imported when it runs."""

import argparse

from ssd_serve.app.cli.flags import Commands
from ssd_serve.bench.document import say
from ssd_serve.bench.experiment import Report, add_experiment
from ssd_serve.bench.extra import need
from ssd_serve.bench.provenance import ENGINE

_ENOUGH_PAIRS = 3


def add_check(commands: Commands) -> None:
    """Add the parser `check`."""
    parser = commands.add_parser(
        "check", help="is this checkout slower than the last release? A few minutes, both interleaved"
    )
    parser.add_argument(
        "--base", help="commit to compare with (default: the last tag v*, else this commit's first parent)"
    )
    parser.add_argument("--seconds", type=float, default=100.0, help="time of measuring, without the start")
    add_experiment(parser, _run_check, ("bench/check", *ENGINE))


def _run_check(args: argparse.Namespace) -> Report:
    """0: every mode is at least as good; 1: one is worse, or it is not shown that it is not."""
    need("ssd bench check", "scipy")
    from ssd_serve.bench.check.checkouts import both_codes
    from ssd_serve.bench.check.comparison import compare, table

    with both_codes(args.base, say) as codes:
        result = compare(codes.new, codes.old, seconds=args.seconds, least=_ENOUGH_PAIRS, say=say)
        verdict = table(result, codes.name)
        return Report(result.as_json(codes.name), lambda _result: verdict, 1 if result.failing else 0)
