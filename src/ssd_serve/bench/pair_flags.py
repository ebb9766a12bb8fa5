"""Anybody's own pair and prompts on a benchmark's command line."""

import argparse
from pathlib import Path

from ssd_serve.app.cli.flags import given_flags
from ssd_serve.base.errors import UserError
from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import resolve


def add_pair(parser: argparse.ArgumentParser) -> None:
    """`TARGET DRAFT`."""
    parser.add_argument("target", nargs="?", metavar="TARGET", help="a folder or hub id (the embedded pair)")
    parser.add_argument("draft", nargs="?", metavar="DRAFT", help="its draft model")


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """`--prompts` and `--chat`."""
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="HumanEval, GSM8K, MT-Bench, JSON lines with prompt or text, or a text a line (Python sources)",
    )
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="ask by the model's chat template (where it has one and the file has questions)",
    )


def pair_settings(args: argparse.Namespace) -> Settings:
    """The settings of a command with `TARGET DRAFT`. Raises `UserError` for half a pair."""
    given = given_flags(args)
    if args.target is not None:
        if args.draft is None:
            raise UserError(f"a pair has a draft too: give it behind {args.target}")
        given |= {"target": args.target, "draft": args.draft}
    return resolve(given)
