"""The command lines of `ssd bench kernels` and `ssd bench conformance`. Everything heavy is imported when
they run."""

import argparse
import os

from ssd_serve.app.cli.flags import Commands
from ssd_serve.base.devices import check_device, parse_device, pin, this_machine
from ssd_serve.base.errors import SettingsError
from ssd_serve.bench.document import say
from ssd_serve.bench.experiment import Report, add_experiment
from ssd_serve.cluster.process import worker_environment


def add_kernels(commands: Commands) -> None:
    """Add the parsers `kernels` and `conformance`; they set `run`."""
    kernels = commands.add_parser("kernels", help="every tree attention backend, by shape, against the roof")
    kernels.add_argument("--heads", type=int, nargs=3, default=[32, 8, 128], metavar=("HEADS", "KV", "SIZE"))
    kernels.add_argument("--repeats", type=_repeats, default=7, help="at least 2 (7)")
    conformance = commands.add_parser(
        "conformance", help="does every tree attention backend compute what it should?"
    )
    conformance.add_argument("--quick", action="store_true", help="float32 only")
    for parser, run in ((kernels, _run_kernels), (conformance, _run_conformance)):
        parser.add_argument("--device", default="cpu", help="cpu or cuda:0 (cpu)")
        add_experiment(parser, run, ("bench/kernels", "kernels"))


def _repeats(text: str) -> int:
    """Quartiles need two values."""
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{number} is too few to tell quartiles from; give 2 or more")
    return number


def _run_kernels(args: argparse.Namespace) -> Report:
    os.environ.update(worker_environment())  # as in the engine's processes; torch is not imported yet
    from ssd_serve.base.settings import Settings
    from ssd_serve.bench.kernels.timing import KernelPlan, run_kernels, table
    from ssd_serve.kernels.native.library import native_library

    heads, kv_heads, head_dim = args.heads
    if min(args.heads) < 1 or heads % kv_heads:
        raise SettingsError("--heads: query heads must be a multiple of KV heads, and all at least 1")
    plan = KernelPlan(_chosen(args.device), heads, kv_heads, head_dim, args.repeats)
    result = run_kernels(plan, native_library(Settings().engine_config()), say)
    return Report(result, table)


def _run_conformance(args: argparse.Namespace) -> Report:
    """1 when any backend that could serve computes something else."""
    os.environ.update(worker_environment())
    from ssd_serve.bench.kernels.timing import check_conformance

    result = check_conformance(_chosen(args.device), say, quick=args.quick)
    verdict = "every backend computes what it should" if result["right"] else "a backend computes otherwise"
    return Report(result, lambda _result: verdict, 0 if result["right"] else 1)


def _chosen(name: str) -> str:
    """torch's name of a device that is there. A GPU becomes the current one: that is where kernels start."""
    device = parse_device(name)
    check_device(device, this_machine(), "--device")
    if device.kind == "cuda" or device.indices:
        pin(device)
    return device.torch_name
