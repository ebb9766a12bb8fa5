"""Emulated devices: real forwards, padded by sleeping to the step times of a device that is not here.

Sleeping devices share nothing, as separate GPUs do. For benchmarks only, and always labelled. The setting
`model_wrapper` (`emulating`) passes the name of the device table to processes. Data sheets, shapes and fits are
those of `ssd plan`.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import psutil  # type: ignore[import-untyped]
import torch

from ssd_serve.app.plan.device_tables import device_sheet
from ssd_serve.app.plan.devices import Forward, Sheets
from ssd_serve.app.plan.known_models import Computing, known_model, sized
from ssd_serve.base.errors import SettingsError
from ssd_serve.base.settings import Settings
from ssd_serve.kernels.batch import Batch
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.wrapped import WrappedModel

_WRAPPER = f"{__name__}:device:"
_REPORT_S = 0.5
_SPIN_S = 60e-6
"""A sleep ends late by about this much; the rest is spun."""
_DRAFT = "llama-3.2-1b"
_TABLES = {
    "mi300x-70b-1b": ("mi300x", 4, "llama-3.1-70b"),
    "mi300x-70b-1b-tp2": ("mi300x", 2, "llama-3.1-70b"),
    "mi300x-8b-1b": ("mi300x", 1, "llama-3.1-8b"),
    "h100-70b-1b": ("h100", 4, "llama-3.1-70b"),
}
"""Data sheet, number of devices and name of the target, in bf16; Llama-3.2-1B has one device more."""

ForwardTimes: TypeAlias = Callable[[Forward], float]
"""Returns the seconds of a forward of a model."""


@dataclass(frozen=True, slots=True)
class DeviceTable:
    """The forward times of a pair, and the number of devices of the target."""

    target: ForwardTimes
    draft: ForwardTimes
    target_devices: int


def device_table(name: str) -> DeviceTable:
    """Return the table of a name; `NAME*F` is the same device F times slower."""
    known, _, slower = name.partition("*")
    table = _TABLES.get(known)
    if table is None or not (slower.isdigit() or name == known) or slower == "0":
        raise SettingsError(
            f"device table {name!r} is unknown; known: {', '.join(sorted(_TABLES))}, "
            "and NAME*F: the same, F times slower"
        )
    sheet, devices, target = table
    factor = int(slower or 1)
    return DeviceTable(_times(sheet, devices, target, factor), _times(sheet, 1, _DRAFT, factor), devices)


def _times(sheet: str, devices: int, model: str, factor: int) -> ForwardTimes:
    description = known_model(model)
    if description is None:
        raise SettingsError(f"no shape of {model} is known")
    sheets = Sheets(device_sheet(sheet), devices)
    planned = sized(model, description, Computing("cuda:0", torch.bfloat16))
    return lambda forward: factor * sheets.step_s(planned, devices, forward)


def forward_of(batch: Batch) -> Forward:
    """Describe a batch by what decides its time; rows without logits are prefill."""
    contexts = batch.prefix_offsets[1:] - batch.prefix_offsets[:-1]
    trees = batch.tree_offsets[1:] - batch.tree_offsets[:-1]
    rows = batch.request_offsets[1:] - batch.request_offsets[:-1]
    read = contexts + trees
    return Forward(batch.rows, batch.rows - len(batch.rows_wanted), int(read.sum()), int((rows * read).sum()))


def emulating(table: str, reports: Path | None = None) -> str:
    """Return the `model_wrapper` setting for a device table; overrun counts are written to `reports`."""
    return f"{_WRAPPER}{table}" + (f"@{reports}" if reports is not None else "")


def emulated_table(settings: Settings) -> str | None:
    """Return the table that `model_wrapper` names; None: nothing is emulated."""
    wrapper = settings.model_wrapper or ""
    return wrapper.removeprefix(_WRAPPER).partition("@")[0] if wrapper.startswith(_WRAPPER) else None


def device(model: Model, role: Literal["target", "draft"], argument: str) -> "EmulatedModel":
    """Wrap a model, with the argument that `emulating` has put behind the name of this function."""
    name, _, folder = argument.partition("@")
    report = Path(folder) / f"{role}-{os.getpid()}.json" if folder else None
    table = device_table(name)
    return EmulatedModel(model, table.target if role == "target" else table.draft, report)


def overrun_share(settings: Settings) -> float:
    """Return the share of slow forwards of running drafter processes, as they have reported so far."""
    folder = Path((settings.model_wrapper or "").partition("@")[2])
    others = {f"draft-{pid}.json" for pid in psutil.pids()} - {f"draft-{os.getpid()}.json"}
    counts = [json.loads(path.read_text()) for path in folder.glob("draft-*.json") if path.name in others]
    forwards = sum(each["forwards"] for each in counts)
    return sum(each["overruns"] for each in counts) / forwards if forwards else 0.0


class EmulatedModel(WrappedModel):
    """A model with the forward times of a table, if these are longer than its own.

    A slower forward counts as an overrun; the file `reports` has their number, updated now and then.
    """

    def __init__(
        self,
        model: Model,
        times: ForwardTimes,
        reports: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(model)
        self._clock = clock
        self._sleep = sleep
        self._reports = reports
        self._reported_at = 0.0
        self._times = times
        self._free_at = 0.0
        self.forwards = 0
        self.overruns = 0

    def forward(self, batch: Batch) -> ForwardResult:
        """Forward; the result is ready when the table's time is over, and the host is free meanwhile.

        A forward begins when the one before is over, as on a GPU.
        """
        started = self._clock()
        end = max(started, self._free_at) + self._times(forward_of(batch))
        result = self._model.forward(batch)
        self.forwards += 1
        now = self._clock()
        self.overruns += now > end
        self._free_at = max(now, end)
        if self._reports is not None and now - self._reported_at > _REPORT_S:
            self._reported_at = now
            self._report(self._reports)
        return replace(result, completion=Deadline(self._free_at, self._clock, self._sleep))

    def _report(self, reports: Path) -> None:
        written = reports.with_suffix(".new")
        with suppress(OSError):  # the benchmark is over
            written.write_text(json.dumps({"forwards": self.forwards, "overruns": self.overruns}))
            written.replace(reports)


@dataclass(frozen=True, slots=True)
class Deadline:
    """The completion of a forward at the time `at` of a clock."""

    at: float
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    def ready(self) -> bool:
        return self.clock() >= self.at

    def wait(self) -> float:
        """Sleep until then and return the time."""
        left = self.at - self.clock()
        if left > _SPIN_S:
            self.sleep(left - _SPIN_S)
        while self.clock() < self.at:
            pass
        return self.at
