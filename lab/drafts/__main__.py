"""The command line of `python -m lab.drafts`. Heavy imports come when it runs."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.command import experiment_parser, run_experiment
from lab.drafts.texts import KINDS
from ssd_serve.bench.document import say
from ssd_serve.bench.experiment import Report
from ssd_serve.bench.extra import need
from ssd_serve.bench.peers.installation import installed, program_named
from ssd_serve.bench.peers.ways import LLAMA
from ssd_serve.bench.provenance import SERVER
from ssd_serve.cluster.local.process import worker_environment
from ssd_serve.models.hub import embedded_folder

MEASURES = ("lab/drafts", "bench/peers", *SERVER)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser("drafts", "what each kind of draft gives, by kind of text and temperature")
    parser.add_argument("--head", type=Path, help="an EAGLE-3 head of the embedded target (the embedded one)")
    parser.add_argument("--llama-server", type=program_named, help="llama.cpp's server (the installed one)")
    parser.add_argument("--num-prompts", type=int, default=12, help="of each kind (12)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each (96)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of texts (all)")
    parser.add_argument("--table", default="mi300x-70b-1b", help="devices that are emulated (mi300x-70b-1b)")
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    need("python -m lab.drafts", "gguf", "scipy")
    os.environ.update(worker_environment())  # torch is not imported yet
    from lab.drafts.experiment import DraftsPlan, run_drafts
    from lab.drafts.report import table

    plan = DraftsPlan(
        prompts=args.num_prompts,
        tokens=args.tokens,
        temperatures=tuple(args.temperatures),
        kinds=tuple(args.kinds),
        table=args.table,
    )
    return Report(
        run_drafts(plan, args.head or embedded_folder("head"), args.llama_server or installed(LLAMA), say),
        table,
    )


if __name__ == "__main__":
    sys.exit(main())
