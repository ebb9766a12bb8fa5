"""The command line of `ssd bench lossless`. Everything heavy is imported when it runs."""

import argparse
from dataclasses import replace

from ssd_serve.app.cli.flags import Commands
from ssd_serve.base.devices import this_machine
from ssd_serve.base.engine_settings import EMBEDDED
from ssd_serve.base.errors import SettingsError
from ssd_serve.base.settings import Settings
from ssd_serve.bench.devices import Devices, add_device_flags, chosen_devices
from ssd_serve.bench.document import say
from ssd_serve.bench.experiment import Report, add_experiment
from ssd_serve.bench.provenance import ENGINE


def add_lossless(commands: Commands) -> None:
    """Add the parser `lossless`."""
    parser = commands.add_parser("lossless", help="any mode, batch, budget and drafter: the plain text")
    parser.add_argument("--quick", action="store_true", help="a small part of the product, in under a minute")
    parser.add_argument("--target", help="with --draft: the target that it drafts for (the embedded one)")
    parser.add_argument(
        "--draft",
        action="append",
        default=[],
        help="what drafts instead of the built-in pairs' models, as SSD_DRAFT names it: a folder, a hub id, "
        "an EAGLE-3 head, self:N, ngram, suffix, an installed source, or several with commas; where the "
        "target is; may be given again",
    )
    add_device_flags(parser)
    add_experiment(parser, _run_lossless, ("bench/lossless", *ENGINE))


def _run_lossless(args: argparse.Namespace) -> Report:
    """0: lossless; 1: a text differed beyond near-ties, or nothing was speculated where it should be."""
    if args.target and not args.draft:
        raise SettingsError("--target needs --draft: what shall draft for it?")
    if idle := [each for each in args.draft if not Settings(draft=each).drafts]:
        raise SettingsError(f"nothing drafts with --draft {idle[0]}")
    devices = chosen_devices(args.device, args.draft_device, this_machine(), Devices())
    from ssd_serve.bench.lossless.proof import QUICK, ProofPlan, run_lossless

    plan = QUICK if args.quick else ProofPlan()
    if args.draft:
        plan = replace(plan, pairs=(args.target or EMBEDDED,), drafts=tuple(args.draft))
    result = run_lossless(plan, say, devices)
    return Report(result, code=0 if result["lossless"] else 1)
