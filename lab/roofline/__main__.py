"""The command line of `python -m lab.roofline`. Everything heavy is imported when it runs."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.command import experiment_parser, run_experiment
from ssd_serve.bench.document import say, write
from ssd_serve.bench.experiment import Report, Result
from ssd_serve.cluster.local.process import worker_environment
from ssd_serve.devices import parse_device, this_machine

_MODES = Path("bench/results/modes.json")

MEASURES = ("lab/roofline", "kernels")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser("roofline", "how far plain, sd and ssd are from what the device can do")
    parser.add_argument("--device", default="cpu", help="cpu, cpu:0-3 or cuda:0 (cpu)")
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto")
    parser.add_argument(
        "--results",
        type=Path,
        help=f"a result of `ssd bench modes` on this machine ({_MODES}, if it is there)",
    )
    parser.add_argument("--no-modes", action="store_true", help="measure the device alone")
    parser.add_argument(
        "--target", type=Path, help="the target's folder, if it was not the benchmark's own ballast model"
    )
    parser.add_argument("--markdown", type=Path, help="write the page to this file")
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    """Measure, compare, print the page."""
    os.environ.update(worker_environment())  # torch is not imported yet
    from lab.roofline.experiment import page, run_roofline
    from ssd_serve.models.sizes import resolve_dtype

    device = parse_device(args.device)
    modes: Path | None = args.results
    if modes is None and not args.no_modes and _MODES.is_file():
        modes = _MODES
    cores = device.indices or this_machine().cores
    say("measuring; whatever else runs is measured too")
    result = run_roofline(
        None if args.no_modes else modes,
        args.target,
        device.torch_name,
        resolve_dtype(args.dtype, device.torch_name),
        cores,
    )

    def text(written: Result) -> str:
        told = page(written)
        write(told + "\n", args.markdown)
        return told

    return Report(result, text)


if __name__ == "__main__":
    sys.exit(main())
