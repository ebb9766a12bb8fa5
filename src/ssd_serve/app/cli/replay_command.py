"""The command line of `ssd replay`. Everything heavy is imported when it runs."""

import argparse
import os
from pathlib import Path

from ssd_serve.app.cli.flags import Commands
from ssd_serve.base.errors import SettingsError
from ssd_serve.cluster.local.process import worker_environment


def add_replay(commands: Commands) -> None:
    """Add the parser `replay`; it sets `run`."""
    parser = commands.add_parser("replay", help="run a session again that SSD_RECORD has recorded")
    parser.add_argument("folder", type=Path, help="what SSD_RECORD was (its newest session), or one session")
    parser.add_argument("--until", type=int, metavar="ROUND", help="stop after this round")
    parser.add_argument(
        "--request", type=int, metavar="N", help="show the rounds of this request, and its text"
    )
    parser.add_argument("--verbose", action="store_true", help="one line a round: rows, nodes, tokens")
    parser.add_argument("--target", help="where the target is now; it must be the recorded one")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    """0: everything is as it was recorded; 1: something differs."""
    if args.until is not None and args.until < 1:
        raise SettingsError("--until must be at least 1")
    os.environ.update(worker_environment())  # torch is not imported yet
    from ssd_serve.app.cli.replay import View, run_replay

    view = View(until=args.until, request=args.request, verbose=args.verbose)
    return run_replay(args.folder, view, target=args.target)
