"""Emulated devices: real forwards, padded by sleeping to the step times of a device that is not here.

Sleeping devices share nothing, as separate GPUs do. For benchmarks only, and always labelled. The setting
`model_wrapper` (`emulating`) passes the table to processes.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from ssd_serve.base.settings import Settings
from ssd_serve.bench.device_tables import ForwardTimes, Role, device_table, forward_of
from ssd_serve.kernels.batch import Batch
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.wrapped import WrappedModel

_WRAPPER = f"{__name__}:device:"
_REPORT_S = 0.5
_SPIN_S = 60e-6
"""A sleep ends late by about this much; the rest is spun."""


def emulating(table: str, reports: Path | None = None) -> str:
    """Return the `model_wrapper` setting for a device table; overrun counts are written to `reports`."""
    return f"{_WRAPPER}{table}" + (f"@{reports}" if reports is not None else "")


def emulated_table(settings: Settings) -> str | None:
    """Return the table that `model_wrapper` names; None: nothing is emulated."""
    wrapper = settings.model_wrapper or ""
    return wrapper.removeprefix(_WRAPPER).partition("@")[0] if wrapper.startswith(_WRAPPER) else None


def device(model: Model, role: Role, argument: str) -> "EmulatedModel":
    """Wrap a model, with the argument that `emulating` has put behind the name of this function."""
    name, _, folder = argument.partition("@")
    report = Path(folder) / f"{role}-{os.getpid()}.json" if folder else None
    return EmulatedModel(model, device_table(name).of(role), report)


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
        self.busy_s = 0.0

    def forward(self, batch: Batch) -> ForwardResult:
        """Forward; the result is ready when the table's time is over, and the host is free meanwhile.

        A forward begins when the one before is over, as on a GPU.
        """
        started = self._clock()
        end = max(started, self._free_at) + self._times.seconds(forward_of(batch))
        result = self._model.forward(batch)
        self.forwards += 1
        now = self._clock()
        self.busy_s += now - started
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
