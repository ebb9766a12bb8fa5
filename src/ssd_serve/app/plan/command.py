"""The command line of `ssd plan`. Everything heavy is imported when it runs."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ssd_serve.app.cli.flags import Commands
from ssd_serve.app.plan.device_tables import device_sheet, sheet_names
from ssd_serve.base.devices import this_machine
from ssd_serve.base.engine_config import EMBEDDED
from ssd_serve.base.errors import MemoryShortError, SettingsError
from ssd_serve.base.settings_sources import resolve
from ssd_serve.base.trusted_files import cache_folder
from ssd_serve.cluster.process import worker_environment
from ssd_serve.models.short_names import ShortNames

if TYPE_CHECKING:
    from ssd_serve.app.plan.devices import Platform
    from ssd_serve.models.hub import Role

_HERE = ("cpu", "cuda")


def add_plan(commands: Commands) -> None:
    """Add the parser `plan`; it sets `run`."""
    parser = commands.add_parser(
        "plan", help="memory and expected speed of a pair of models, here or on other devices"
    )
    parser.add_argument(
        "target",
        nargs="?",
        metavar="TARGET",
        help="a folder, a GGUF file, a hub id, a name or 'embedded' (SSD_TARGET)",
    )
    parser.add_argument("drafts", nargs="*", metavar="DRAFT", help="the same; several are compared")
    parser.add_argument(
        "--device", help=f"{', '.join((*sheet_names(), *_HERE))} (this machine's GPUs, else its cores)"
    )
    parser.add_argument("--devices", type=int, help="how many of them (1; of this machine: all)")
    parser.add_argument(
        "--acceptance",
        type=float,
        nargs="+",
        default=[0.75],
        help="share of first guesses that are right; one for each draft, or for all (0.75)",
    )
    parser.add_argument("--requests", type=int, default=1, help="requests that decode together (1)")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each, prompt and output (4096)")
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the page")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    """0, or the exit code of too little memory where the target does not fit."""
    os.environ.update(worker_environment())  # torch is not imported yet
    from ssd_serve.app.plan.known_models import (
        Computing,
        PlannedModel,
        multiplied_fp8,
        planned_model,
        torch_dtype,
    )
    from ssd_serve.app.plan.plan import Plan, PlanOptions, best_draft, page
    from ssd_serve.kernels.device import dtype_name
    from ssd_serve.models.roof import roof_dtype

    settings = resolve({})
    wanted: str = args.target or settings.target
    drafts: list[str] = args.drafts or ([EMBEDDED] if wanted == EMBEDDED else [])
    names = ShortNames(settings.models_file, settings.cache_dir)
    acceptances: list[float] = args.acceptance
    if len(acceptances) not in (1, max(1, len(drafts))):
        raise SettingsError("--acceptance needs one value, or one for each draft")
    loads = [PlanOptions(each, args.requests, args.context) for each in acceptances]
    for load in loads:
        load.check()
    if args.devices is not None and not 1 <= args.devices <= 1024:
        raise SettingsError("--devices must be from 1 to 1024")
    device = args.device or ("cuda" if this_machine().gpus else "cpu")
    kind = "cpu" if device == "cpu" else "cuda:0"
    dtype = torch_dtype(args.dtype, kind)
    computing = Computing(kind, dtype, multiplied_fp8(device), args.dtype)

    def planned(name: str, role: "Role") -> PlannedModel:
        return planned_model(names.expand(name), role, computing, settings.hf_token)

    target = planned(wanted, "target")
    others: list[PlannedModel | None] = [planned(name, "draft") for name in drafts]
    folder = cache_folder(settings.cache_dir, lambda _: None)
    served = {roof_dtype(each.served_dtype) for each in (target, *others) if each and each.served_dtype}
    platform = _platform(device, args.devices, sorted(served) or [dtype_name(dtype)], folder)
    if len(loads) == 1:
        loads *= max(1, len(others))
    pairs = zip(others or [None], loads, strict=True)
    plans = [Plan(platform, target, draft, load) for draft, load in pairs]
    print(json.dumps([plan.as_json() for plan in plans], indent=1) if args.json else page(plans))
    return 0 if best_draft(plans).best is not None else MemoryShortError.exit_code


def _platform(device: str, count: int | None, dtypes: Sequence[str], folder: Path) -> "Platform":
    """Platform from the table of data sheets, or measured on this machine."""
    from ssd_serve.app.plan.devices import Sheets

    if device not in _HERE:
        sheet = device_sheet(device)
        if "float32" in dtypes:
            raise SettingsError("the table's throughput is that of bf16; use --dtype bf16 or fp16")
        return Sheets(sheet, count or 1)
    from ssd_serve.app.plan.devices import this_cpu, this_gpu
    from ssd_serve.kernels.native.library import native_library

    machine = this_machine()
    print("measuring this machine for some seconds", file=sys.stderr, flush=True)
    have = len(machine.cores) if device == "cpu" else machine.gpus
    if (count or 1) > have:
        raise SettingsError(f"--devices is {count}, and this machine has {have}; name another --device")
    count = count or have
    if device != "cpu":
        return this_gpu(count, dtypes[0])
    native = native_library(resolve({}).engine_config())
    return this_cpu(machine.cores[:count], dtypes, folder, native)
