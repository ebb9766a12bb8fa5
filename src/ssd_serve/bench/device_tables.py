"""Device tables: pairs of models on devices that are not here, by name, and what each forward takes there.

Data sheets, shapes and fits are those of `ssd plan`. Knows no processes and no clocks.
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
    """What forwards of one model take."""

    def seconds(self, forward: Forward) -> float:
        """Seconds of this one."""
        ...


@dataclass(frozen=True, slots=True)
class Placed:
    """A model on some devices of a data sheet, `slower` times as slow as they are."""

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
    """The times of a pair, and how many devices each of the two has."""

    name: str
    target: ForwardTimes
    draft: ForwardTimes
    target_devices: int = 1
    draft_devices: int = 1

    def of(self, role: Role) -> ForwardTimes:
        """The times of one of the two."""
        return self.target if role == "target" else self.draft

    def devices(self, drafter_beside: bool) -> int:
        """How many devices a way to decode occupies: the drafter's own only where it works `drafter_beside`
        the target."""
        return self.target_devices + (self.draft_devices if drafter_beside else 0)


def device_table(name: str) -> DeviceTable:
    """The table of this name; `NAME*F` is the same device F times slower, for drafts that this machine
    computes too slowly.

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
    """What a forward of this batch is to a device. Rows whose logits nobody wants are a prompt's."""
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
