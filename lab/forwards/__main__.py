"""The command line of `python -m lab.forwards`. Heavy imports come when it runs."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.command import experiment_parser, run_experiment
from ssd_serve.bench.document import say
from ssd_serve.bench.experiment import Report
from ssd_serve.bench.numbers import count
from ssd_serve.cluster.local.process import worker_environment
from ssd_serve.devices import check_device, parse_device, pin, this_machine
from ssd_serve.errors import SettingsError

MEASURES = ("lab/forwards", "kernels", "models", "src/ssd_serve/plan")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser("forwards", "seconds of forwards on a GPU, beside what the device table says")
    parser.add_argument("--models", nargs="+", default=["llama-3.2-1b", "llama-3.1-8b"], metavar="NAME")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--sheet", default="", help="of the device table (the GPU's own)")
    parser.add_argument("--attention", nargs="+", default=["auto"], metavar="BACKEND")
    parser.add_argument("--graphs", choices=("on", "off", "both"), default="on")
    parser.add_argument("--rows", type=count, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--contexts", type=count, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--repeats", type=count, default=16)
    parser.add_argument(
        "--folder", type=Path, default=Path("/dev/shm"), help="room for the weights' files, random numbers"
    )
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    os.environ.update(worker_environment())  # torch is not imported yet
    from lab.forwards.experiment import ForwardsPlan, measure
    from lab.forwards.report import table

    device = parse_device(args.device)
    if device.kind != "cuda":
        raise SettingsError("--device: the device table holds GPUs; name one, such as cuda:0")
    check_device(device, this_machine(), "--device")
    pin(device)
    plan = ForwardsPlan(
        models=args.models,
        device=device.torch_name,
        sheet=args.sheet,
        attention=args.attention,
        graphs={"on": (True,), "off": (False,), "both": (True, False)}[args.graphs],
        rows=args.rows,
        contexts=args.contexts,
        repeats=args.repeats,
        folder=args.folder,
    )
    return Report(measure(plan, say), table)


if __name__ == "__main__":
    sys.exit(main())
