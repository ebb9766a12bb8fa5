"""The command line of `python -m lab.grammar_drafts`. Heavy imports come when it runs."""

import argparse
import sys
from collections.abc import Sequence

from lab.command import experiment_parser, run_experiment
from ssd_serve.bench.experiment import Report
from ssd_serve.bench.provenance import SERVER

MEASURES = ("lab/grammar_drafts", "lab/grammars/schemas.py", *SERVER)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser(
        "grammar_drafts", "structured output, with drafts that keep to its grammar or not"
    )
    parser.add_argument("--modes", nargs="+", choices=("sd", "ssd"), default=["sd", "ssd"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--schemas", type=int, default=60)
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    from lab.grammar_drafts.experiment import run_grammar_drafts

    return Report(run_grammar_drafts(args.modes, args.temperatures, args.schemas))


if __name__ == "__main__":
    sys.exit(main())
