"""The command line of `python -m lab.host`. Heavy imports come when it runs."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.command import experiment_parser, run_command
from ssd_serve.bench.document import write_json
from ssd_serve.bench.restart import restart_as_worker
from ssd_serve.cli.flags import add_settings_flags, settings_from


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser("host", "what the host adds to a round and to a draft step")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32], help="requests at once")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    add_settings_flags(parser)
    return run_command(parser, _run, argv)


def _run(args: argparse.Namespace) -> int:
    restart_as_worker()  # this process plays the verifier
    from lab.host.experiment import run_host

    result = run_host(
        settings_from(args), args.batches, lambda text: print(text, file=sys.stderr, flush=True)
    )
    if args.json is None:
        print(json.dumps(result, indent=1))
    else:
        write_json(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
