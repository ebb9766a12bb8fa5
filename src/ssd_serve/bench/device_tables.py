"""Device tables: forward times of pairs of models on devices that are not here, by name.

Data sheets, shapes and fits are those of `ssd plan`.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from ssd_serve.app.plan.device_tables import device_sheet
from ssd_serve.app.plan.devices import Forward, Sheets
from ssd_serve.app.plan.known_models import Computing, PlannedModel, known_model, sized
from ssd_serve.base.errors import SettingsError
from ssd_serve.kernels.batch import Batch

Role = Literal["target", "draft"]


class ForwardTimes(Protocol):
    """Forward times of a model."""

    def seconds(self, forward: Forward) -> float:
        """Return the seconds of a forward."""
        ...


@dataclass(frozen=True, slots=True)
class Placed:
    """A model on devices of a data sheet, `slower` times as slow as these."""

    platform: Sheets
    model: PlannedModel
    slower: int = 1

    def seconds(self, forward: Forward) -> float:
        return self.slower * self.platform.step_s(self.model, self.platform.count, forward)


@dataclass(frozen=True, slots=True)
class Flat:
    """`step_s` for any forward up to `rows` rows, and proportional beyond."""

    step_s: float
    rows: int = 64

    def seconds(self, forward: Forward) -> float:
        return self.step_s * max(1.0, forward.rows / self.rows)


@dataclass(frozen=True, slots=True)
class DeviceTable:
    """The forward times of a pair, and the number of devices of each model."""

    name: str
    target: ForwardTimes
    draft: ForwardTimes
    target_devices: int = 1
    draft_devices: int = 1

    def of(self, role: Role) -> ForwardTimes:
        """Return the times of the target or the draft."""
        return self.target if role == "target" else self.draft

    def devices(self, asynchronous: bool) -> int:
        """Return the number of devices of a mode; `asynchronous` modes also use the drafter's device."""
        return self.target_devices + (self.draft_devices if asynchronous else 0)


def device_table(name: str) -> DeviceTable:
    """Return the table of a name; `NAME*F` is the same device F times slower.

    mi300x-70b-1b: Llama-3.1-70B on 4 MI300X with Llama-3.2-1B on one, in bf16; -tp2: the target on 2;
    h100-70b-1b: on 4 H100 and one.
    """
    tables = {
        "mi300x-70b-1b": ("mi300x", 4),
        "mi300x-70b-1b-tp2": ("mi300x", 2),
        "h100-70b-1b": ("h100", 4),
    }
    known, _, slower = name.partition("*")
    table = tables.get(known)
    if table is None or not (slower.isdigit() or name == known) or slower == "0":
        raise SettingsError(
            f"device table {name!r} is unknown; known: {', '.join(sorted(tables))}, "
            "and NAME*F: the same, F times slower"
        )
    sheet, devices = device_sheet(table[0]), table[1]
    factor = int(slower or 1)
    target = Placed(Sheets(sheet, devices), _shape("llama-3.1-70b"), factor)
    draft = Placed(Sheets(sheet, 1), _shape("llama-3.2-1b"), factor)
    return DeviceTable(name, target, draft, devices, 1)


def forward_of(batch: Batch) -> Forward:
    """Describe a batch by what decides its time; rows without logits are prefill."""
    contexts = batch.prefix_offsets[1:] - batch.prefix_offsets[:-1]
    trees = batch.tree_offsets[1:] - batch.tree_offsets[:-1]
    rows = batch.request_offsets[1:] - batch.request_offsets[:-1]
    read = contexts + trees
    return Forward(batch.rows, batch.rows - len(batch.rows_wanted), int(read.sum()), int((rows * read).sum()))


def _shape(name: str) -> PlannedModel:
    description = known_model(name)
    if description is None:
        raise SettingsError(f"no shape of {name} is known")
    return sized(name, description, Computing("cuda:0", torch.bfloat16))
