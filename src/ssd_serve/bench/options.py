"""Flags that several benchmarks have: devices, a pair of models, prompts, and checked numbers."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from ssd_serve.app.cli.flags import given_flags
from ssd_serve.base.devices import Device, Machine, check_device, parse_device
from ssd_serve.base.engine_config import EMBEDDED
from ssd_serve.base.errors import UserError
from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import resolve

_CPU = Device("cpu")


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def count_or_zero(text: str) -> int:
    """Parse a whole number of at least 0."""
    return 0 if text.strip() == "0" else count(text)


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be greater than 0, and finite")
    return value


def positive_or_zero(text: str) -> float:
    """Parse a finite number of at least 0."""
    return positive(text) if float(text) else 0.0


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of target and drafter."""

    target: Device = _CPU
    draft: Device = _CPU

    @property
    def on_gpu(self) -> bool:
        """True if either of them is a GPU."""
        return "cuda" in (self.target.kind, self.draft.kind)

    def names(self) -> dict[str, str]:
        """Return both names for result files."""
        return {"target": str(self.target), "draft": str(self.draft)}


def add_device_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--device` and `--draft-device`."""
    parser.add_argument("--device", default="cpu", help="target device: cpu or cuda:0 (cpu)")
    parser.add_argument(
        "--draft-device", default="", help="drafter device (a second GPU if there is one, else as --device)"
    )


def chosen_devices(target: str, draft: str, machine: Machine, cores: Devices) -> Devices:
    """Resolve device names; `cores` is the meaning of `cpu` without numbers for both models.

    An empty `draft` is a second GPU if there is one, else the target's device, and on a CPU a core that the
    target does not use. Raises `SettingsError` for a device that this machine lacks.
    """
    first = parse_device(target)
    if first == _CPU:
        first = cores.target
    check_device(first, machine, "--device")
    second = parse_device(draft) if draft else _default_draft(first, machine, cores)
    check_device(second, machine, "--draft-device")
    return Devices(first, second)


def _default_draft(target: Device, machine: Machine, cores: Devices) -> Device:
    if target == cores.target:
        return cores.draft
    there = range(machine.gpus) if target.kind == "cuda" else machine.cores
    spare = [index for index in there if index not in target.indices]
    return Device(target.kind, (spare[0],)) if spare else target


def add_pair(parser: argparse.ArgumentParser) -> None:
    """Add the optional arguments `TARGET DRAFT`, `--prompts` and `--chat`."""
    parser.add_argument("target", nargs="?", metavar="TARGET", help="a folder or hub id (the embedded pair)")
    parser.add_argument("draft", nargs="?", metavar="DRAFT", help="its draft model")
    add_prompts(parser)
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="apply the model's chat template (if it has one and the file has questions)",
    )


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Add `--prompts`."""
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="HumanEval, GSM8K, MT-Bench, JSON lines with prompt or text, or a text a line (Python sources)",
    )


def pair_settings(args: argparse.Namespace) -> Settings:
    """Return the settings of a command with `TARGET DRAFT`. Raises `UserError` for a target alone."""
    given = given_flags(args)
    if args.target is not None:
        if args.draft is None:
            raise UserError(f"a pair needs a draft: give it behind {args.target}")
        given |= {"target": args.target, "draft": args.draft}
    settings = resolve(given)
    named = "target" in settings.model_fields_set
    return settings if named else resolve({**given, "target": EMBEDDED})
