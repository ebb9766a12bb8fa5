"""The command line of `ssd bench channels`. Everything heavy is imported when it runs."""

import argparse
import sys
from pathlib import Path

from ssd_serve.bench.document import write_json
from ssd_serve.flags import Commands, add_settings_flags, settings_from


def add_channels(commands: Commands) -> None:
    """Add the parser `channels`; it sets `run`."""
    parser = commands.add_parser(
        "channels", help="a message there and back over sockets and through Ray; starts of both launchers"
    )
    parser.add_argument("--messages", type=int, default=2000, help="of each kind (2000)")
    parser.add_argument("--starts", type=int, default=3, help="of each launcher (3)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    add_settings_flags(parser)
    parser.set_defaults(run=_run_channels)


def _run_channels(args: argparse.Namespace) -> int:
    from ssd_serve.bench.channels import Plan, run_channels, table

    plan = Plan(max(1, args.messages), max(1, args.starts))
    result = run_channels(settings_from(args), plan, lambda text: print(text, file=sys.stderr, flush=True))
    print(table(result))
    if args.json is not None:
        write_json(result, args.json)
    return 0
