"""The command line of `python -m lab.pair`. Heavy imports come when it runs."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.command import experiment_parser, run_experiment
from ssd_serve.bench.experiment import Report
from ssd_serve.models.hub import embedded_folder

WEIGHTS = tuple(f"models/embedded/{role}/model.safetensors" for role in ("target", "draft"))
MEASURES = ("lab/pair", "recipes", *WEIGHTS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser("pair", "the embedded pair: losses, agreement, functions, and loops")
    parser.add_argument("--target", type=Path, help="another target that names its held-out files")
    parser.add_argument("--draft", type=Path, help="its draft")
    parser.add_argument("--samples", type=int, default=100, help="functions to sample at each temperature")
    parser.add_argument("--places", type=int, default=100, help="continuations looked at for loops")
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    from lab.pair.experiment import run_pair

    target = args.target or embedded_folder("target")
    return Report(run_pair(target, args.draft or embedded_folder("draft"), args.samples, args.places))


if __name__ == "__main__":
    sys.exit(main())
