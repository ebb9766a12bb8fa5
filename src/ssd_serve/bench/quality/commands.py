"""The command line of `ssd bench quality`. Everything heavy is imported when it runs."""

import argparse

from ssd_serve.app.cli.flags import Commands
from ssd_serve.base.engine_settings import EMBEDDED
from ssd_serve.base.errors import UserError
from ssd_serve.bench.document import say
from ssd_serve.bench.experiment import Report, add_experiment

_DTYPES = ("fp32", "bf16", "fp16", "int8")


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
    add_experiment(parser, _run_quality, ("bench/quality", "kernels", "models"))


def _run_quality(args: argparse.Namespace) -> Report:
    from ssd_serve.bench.quality.measurement import measure_quality, table
    from ssd_serve.models.hub import resolve_model

    if args.positions < 1:
        raise UserError("--positions must be at least 1")
    result = measure_quality(
        resolve_model(args.target, "target"),
        positions=args.positions,
        dtypes=tuple(dict.fromkeys(args.dtypes)),
        say=say,
    )
    return Report(result, table)
