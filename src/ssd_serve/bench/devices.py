"""The devices that a benchmark's flags name: checked against this machine, chosen where they are left out.

Knows names of devices; torch is not imported here.
"""

import argparse
from dataclasses import dataclass

from ssd_serve.base.devices import Device, Machine, check_device, parse_device

_CPU = Device("cpu")


@dataclass(frozen=True, slots=True)
class Devices:
    """Where target and drafter compute."""

    target: Device = _CPU
    draft: Device = _CPU

    @property
    def on_gpu(self) -> bool:
        """Whether either of them is a GPU."""
        return "cuda" in (self.target.kind, self.draft.kind)

    def names(self) -> dict[str, str]:
        """For result files."""
        return {"target": str(self.target), "draft": str(self.draft)}


def add_device_flags(parser: argparse.ArgumentParser) -> None:
    """`--device` and `--draft-device`."""
    parser.add_argument("--device", default="cpu", help="of the target: cpu or cuda:0 (cpu)")
    parser.add_argument(
        "--draft-device",
        default="",
        help="of the drafter (a second GPU where there is one, else as --device)",
    )


def chosen_devices(target: str, draft: str, machine: Machine, cores: Devices) -> Devices:
    """The devices named `target` and `draft`. `cores`: what `cpu` without cores means for both.

    An empty `draft` is a second GPU where there is one, else the target's, and beside a CPU a core that the
    target leaves free. Raises `SettingsError` where this machine lacks one.
    """
    first = parse_device(target)
    if first == _CPU:
        first = cores.target
    check_device(first, machine, "--device")
    second = parse_device(draft) if draft else _beside(first, machine, cores)
    check_device(second, machine, "--draft-device")
    return Devices(first, second)


def _beside(target: Device, machine: Machine, cores: Devices) -> Device:
    if target == cores.target:
        return cores.draft
    there = range(machine.gpus) if target.kind == "cuda" else machine.cores
    spare = [index for index in there if index not in target.indices]
    return Device(target.kind, (spare[0],)) if spare else target
