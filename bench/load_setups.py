"""Who runs on what in the load benchmark: the settings of each server, and the cores of the client.

Knows settings and devices, not what is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ssd_serve.bench.both import BALLAST_HIDDEN, DRAFT_LAYERS, TARGET_LAYERS
from ssd_serve.bench.load_outcome import ALL_DEVICES
from ssd_serve.cluster.placement import place
from ssd_serve.devices import Device, Machine
from ssd_serve.models.hub import resolve_model
from ssd_serve.recipes.ballast import add_ballast
from ssd_serve.settings import EMBEDDED, Mode, Settings


@dataclass(frozen=True, slots=True)
class Setups:
    """Settings by name of the server, and the client's cores (None: any)."""

    servers: dict[str, Settings]
    client: Device | None
    target: Device
    draft: Device

    def described(self) -> dict[str, str]:
        """For the result file."""
        client = "any" if self.client is None else str(self.client)
        return {"target_device": str(self.target), "draft_device": str(self.draft), "client_device": client}


def setups(settings: Settings, modes: Sequence[str], all_devices: bool, machine: Machine) -> Setups:
    """All modes on the devices that mode `ssd` would have, and plain decoding on all of them.

    The drafter's device stays idle where a mode has no drafter. The client keeps off the target's cores: it
    shares those of drafter and front end.
    """
    placement = place(settings.model_copy(update={"mode": Mode.SSD}), machine)
    target, draft = placement.target, placement.draft or placement.target
    devices = {"target_device": str(target), "draft_device": str(draft)}
    servers = {mode: settings.model_copy(update={**devices, "mode": Mode(mode)}) for mode in modes}
    # Emulated step times do not depend on cores, and one model on several GPUs is not built.
    if all_devices and target.kind == draft.kind == "cpu" and not settings.emulate:
        both = Device("cpu", tuple(sorted({*target.indices, *draft.indices})))
        whole = {"mode": Mode.AR, "target_device": str(both), "draft_device": None}
        servers[ALL_DEVICES] = settings.model_copy(update=whole)
    cores = tuple(core for core in machine.cores if core not in target.indices)
    client = Device("cpu", cores) if cores and target.kind == "cpu" and target.indices else None
    return Setups(servers, client, target, draft)


def ballast_pair(folder: Path) -> dict[str, str]:
    """The embedded pair at a larger cost, as in the modes benchmark: the settings that name it."""
    target, draft = folder / "target", folder / "draft"
    add_ballast(resolve_model(EMBEDDED, "target"), target, BALLAST_HIDDEN, TARGET_LAYERS)
    add_ballast(resolve_model(EMBEDDED, "draft"), draft, BALLAST_HIDDEN, DRAFT_LAYERS)
    return {"target": str(target), "draft": str(draft)}
