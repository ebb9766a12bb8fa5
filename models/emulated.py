"""Emulated devices: real forwards, padded by sleeping to the step times of a device that is not here.

Sleeping devices share nothing, as separate GPUs do. For benchmarks only, and always labelled. Knows step
times, not what is forwarded.
"""

import time
from dataclasses import dataclass, replace

from ssd_serve.errors import SettingsError
from ssd_serve.kernels.batch import Batch
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.wrapped import WrappedModel

_SPIN_S = 60e-6
"""A sleep ends late by about this much; the rest is spun."""


@dataclass(frozen=True, slots=True)
class DeviceTable:
    """Step times of a pair in seconds, flat up to `flat_rows` rows and proportional beyond."""

    target_s: float
    draft_s: float
    flat_rows: int


def device_table(name: str) -> DeviceTable:
    """The table of this name; `NAME*F` is the same device F times slower, for drafts that this machine
    computes too slowly.

    mi300x-70b-1b: Llama-3.1-70B at tensor parallel 4 with Llama-3.2-1B, as AMD's published tokens/s imply.
    """
    tables = {"mi300x-70b-1b": DeviceTable(target_s=0.0191, draft_s=0.0018, flat_rows=64)}
    known, _, slower = name.partition("*")
    table = tables.get(known)
    if table is None or not (slower.isdigit() or slower == "") or slower == "0":
        raise SettingsError(
            f"device table {name!r} is unknown; known: {', '.join(sorted(tables))}, "
            "and NAME*F: the same, F times slower"
        )
    factor = int(slower or 1)
    return DeviceTable(factor * table.target_s, factor * table.draft_s, table.flat_rows)


class EmulatedModel(WrappedModel):
    """A model whose forwards take at least `step_s`. A forward that takes longer counts as it is."""

    def __init__(self, model: Model, step_s: float, flat_rows: int) -> None:
        super().__init__(model)
        self._step_s = step_s
        self._flat_rows = flat_rows
        self.forwards = 0
        self.overruns = 0
        self.busy_s = 0.0

    def forward(self, batch: Batch) -> ForwardResult:
        """Forward; the result is ready when the table's time is over. The host is free meanwhile, as beside a
        GPU."""
        started = time.perf_counter()
        end = started + self._step_s * max(1.0, batch.rows / self._flat_rows)
        result = self._model.forward(batch)
        self.forwards += 1
        now = time.perf_counter()
        self.busy_s += now - started
        self.overruns += now > end
        return replace(result, completion=Deadline(max(now, end)))


@dataclass(frozen=True, slots=True)
class Deadline:
    """A forward that is over at the time `at` of `time.perf_counter`."""

    at: float

    def ready(self) -> bool:
        """Whether the time has come."""
        return time.perf_counter() >= self.at

    def wait(self) -> float:
        """Sleep until then."""
        left = self.at - time.perf_counter()
        if left > _SPIN_S:
            time.sleep(left - _SPIN_S)
        while time.perf_counter() < self.at:
            pass
        return self.at
