"""The command line of `ssd bench lossless`. Everything heavy is imported when it runs."""

import argparse
from pathlib import Path

from ssd_serve.bench.devices import Devices, add_device_flags, chosen_devices
from ssd_serve.bench.document import say, show
from ssd_serve.cli.flags import Commands
from ssd_serve.devices import this_machine


def add_lossless(commands: Commands) -> None:
    """Add the parser `lossless`."""
    parser = commands.add_parser("lossless", help="any mode, batch, budget and drafter: the plain text")
    parser.add_argument("--quick", action="store_true", help="a small part of the product, in under a minute")
    add_device_flags(parser)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.set_defaults(run=_run_lossless)


def _run_lossless(args: argparse.Namespace) -> int:
    """0: lossless; 1: a text differed beyond near-ties, or nothing was speculated where it should be."""
    devices = chosen_devices(args.device, args.draft_device, this_machine(), Devices())
    from ssd_serve.bench.lossless.proof import QUICK, Plan, run_lossless

    plan = QUICK if args.quick else Plan()
    result = run_lossless(plan, say, devices)
    show(result, args.json)
    return 0 if result["lossless"] else 1
