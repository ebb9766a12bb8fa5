"""Who runs on what in the load benchmark: the settings of each server, and the cores of the client.

Knows settings and devices, not what is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ssd_serve.base.devices import Device, Machine
from ssd_serve.base.engine_settings import Mode
from ssd_serve.base.errors import UserError
from ssd_serve.base.settings import Settings
from ssd_serve.bench.emulated import emulated_table
from ssd_serve.bench.load.groups import ALL, ALL_DEVICES, SAME
from ssd_serve.cluster.placement import place

Devices = Literal["same", "all", "both"]
"""The same device for the target in every mode, or for the target whatever a mode leaves free, or both."""


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


def setups(settings: Settings, modes: Sequence[str], devices: Devices, machine: Machine) -> Setups:
    """All modes with the target on one device, and once more where it may use the drafter's cores as well.

    The devices are those that mode `ssd` would have. With the same device for the target, the drafter's stays
    idle where a mode has no drafter. `sd` and `ssd` never stop speculating, so that there is something to
    choose from. The client keeps off the target's cores: it shares those of drafter and front end.
    """
    placement = place(settings.model_copy(update={"mode": Mode.SSD}), machine)
    target, draft = placement.target, placement.draft or placement.target
    by_core = target.kind == draft.kind == "cpu"
    if devices == "all" and (emulated_table(settings) or not by_core):
        raise UserError(
            "emulated step times do not depend on cores, and one model on several GPUs is not built: "
            "choose --devices same"
        )
    both = Device("cpu", tuple(sorted({*target.indices, *draft.indices}))) if by_core else target
    servers: dict[str, Settings] = {}
    for name in _names(modes, devices, widen=by_core and not emulated_table(settings)):
        mode, whole = Mode(name.removesuffix(ALL_DEVICES)), name.endswith(ALL_DEVICES)
        servers[name] = settings.model_copy(
            update={
                "mode": mode,
                "target_device": str(both if whole and mode is not Mode.AUTO else target),
                "target_device_alone": str(both) if whole and mode is Mode.AUTO else None,
                "draft_device": str(draft),
                "speculation_may_stop": mode is Mode.AUTO,
            }
        )
    cores = tuple(core for core in machine.cores if core not in target.indices)
    client = Device("cpu", cores) if cores and target.kind == "cpu" and target.indices else None
    return Setups(servers, client, target, draft)


def _names(modes: Sequence[str], devices: Devices, widen: bool) -> list[str]:
    """Names of the servers, each once."""
    groups = [SAME] if devices == "same" or not widen else [ALL] if devices == "all" else [SAME, ALL]
    names = dict.fromkeys(name for group in groups for name in group)
    return [name for name in names if name.removesuffix(ALL_DEVICES) in modes]
