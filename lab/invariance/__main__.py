"""The command line of `python -m lab.invariance`. Heavy imports come when it runs."""

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
    parser = experiment_parser("invariance", "what SSD_BATCH_INVARIANT costs a forward of the target")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    add_settings_flags(parser)
    return run_command(parser, _run, argv)


def _run(args: argparse.Namespace) -> int:
    restart_as_worker()  # this process plays the verifier
    from lab.invariance.experiment import Plan, run_invariance

    result = run_invariance(
        settings_from(args),
        Plan(repeats=args.repeats),
        lambda text: print(text, file=sys.stderr, flush=True),
    )
    if args.json is None:
        print(json.dumps(result, indent=1))
    else:
        write_json(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
