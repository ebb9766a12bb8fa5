"""The command line of `ssd bench lossless`. Everything heavy is imported when it runs."""

import argparse

from ssd_serve.bench.devices import Devices, add_device_flags, chosen_devices
from ssd_serve.bench.document import say
from ssd_serve.bench.experiment import Report, add_experiment
from ssd_serve.bench.provenance import ENGINE
from ssd_serve.cli.flags import Commands
from ssd_serve.devices import this_machine


def add_lossless(commands: Commands) -> None:
    """Add the parser `lossless`."""
    parser = commands.add_parser("lossless", help="any mode, batch, budget and drafter: the plain text")
    parser.add_argument("--quick", action="store_true", help="a small part of the product, in under a minute")
    add_device_flags(parser)
    add_experiment(parser, _run_lossless, ("bench/lossless", *ENGINE))


def _run_lossless(args: argparse.Namespace) -> Report:
    """0: lossless; 1: a text differed beyond near-ties, or nothing was speculated where it should be."""
    devices = chosen_devices(args.device, args.draft_device, this_machine(), Devices())
    from ssd_serve.bench.lossless.proof import QUICK, ProofPlan, run_lossless

    plan = QUICK if args.quick else ProofPlan()
    result = run_lossless(plan, say, devices)
    return Report(result, code=0 if result["lossless"] else 1)
