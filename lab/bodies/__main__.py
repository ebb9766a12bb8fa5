"""The command line of `python -m lab.bodies`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.command import experiment_parser, run_command
from ssd_serve.bench.document import write_json


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser(
        "bodies", "how long bodies of every kind hold up the front end, and the memory that they take"
    )
    parser.add_argument("only", nargs="*", help="parts of the names of kinds; none: all")
    parser.add_argument("--passes", type=int, default=3, help="of each kind; the worst one is told (3)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    return run_command(parser, _run, argv)


def _run(args: argparse.Namespace) -> int:
    from lab.bodies.experiment import run_bodies, table

    result = run_bodies(args.only, max(1, args.passes), lambda text: print(text, file=sys.stderr, flush=True))
    print(table(result))
    if args.json is not None:
        write_json(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
