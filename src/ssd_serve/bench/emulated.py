"""Emulated devices: real forwards, padded by sleeping to the step times of a device that is not here.

Sleeping devices share nothing, as separate GPUs do. For benchmarks only, and always labelled. Processes are
told by the setting `model_wrapper` (`emulating`). Knows step times, not what is forwarded.
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
_TELL_S = 0.5
_SPIN_S = 60e-6
"""A sleep ends late by about this much; the rest is spun."""


def emulating(table: str, told: Path | None = None) -> str:
    """The setting `model_wrapper` of processes whose devices are those of a table; in the folder `told` they
    say how many of their forwards took longer."""
    return f"{_WRAPPER}{table}" + (f"@{told}" if told is not None else "")


def emulated_table(settings: Settings) -> str | None:
    """The table that `model_wrapper` names; None: nothing is emulated."""
    wrapper = settings.model_wrapper or ""
    return wrapper.removeprefix(_WRAPPER).partition("@")[0] if wrapper.startswith(_WRAPPER) else None


def device(model: Model, role: Role, argument: str) -> "EmulatedModel":
    """Called with what `emulating` has put behind its name."""
    name, _, folder = argument.partition("@")
    told = Path(folder) / f"{role}-{os.getpid()}.json" if folder else None
    return EmulatedModel(model, device_table(name).of(role), told)


def overrun_share(settings: Settings) -> float:
    """Share of the forwards of running drafters, in processes of their own, that took longer than their table
    says: as they have said so far in the folder that these settings name."""
    folder = Path((settings.model_wrapper or "").partition("@")[2])
    others = {f"draft-{pid}.json" for pid in psutil.pids()} - {f"draft-{os.getpid()}.json"}
    counts = [json.loads(path.read_text()) for path in folder.glob("draft-*.json") if path.name in others]
    forwards = sum(each["forwards"] for each in counts)
    return sum(each["overruns"] for each in counts) / forwards if forwards else 0.0


class EmulatedModel(WrappedModel):
    """A model whose forwards take at least what a table says of their rows and contexts. A forward that takes
    longer counts as it is; the file `told` says now and then how many did."""

    def __init__(
        self,
        model: Model,
        times: ForwardTimes,
        told: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(model)
        self._clock = clock
        self._sleep = sleep
        self._told = told
        self._told_at = 0.0
        self._times = times
        self._free_at = 0.0
        self.forwards = 0
        self.overruns = 0
        self.busy_s = 0.0

    def forward(self, batch: Batch) -> ForwardResult:
        """Forward; the result is ready when the table's time is over. The host is free meanwhile, as beside a
        GPU. A forward that is asked for earlier begins when the one before is over."""
        started = self._clock()
        end = max(started, self._free_at) + self._times.seconds(forward_of(batch))
        result = self._model.forward(batch)
        self.forwards += 1
        now = self._clock()
        self.busy_s += now - started
        self.overruns += now > end
        self._free_at = max(now, end)
        if self._told is not None and now - self._told_at > _TELL_S:
            self._told_at = now
            self._tell(self._told)
        return replace(result, completion=Deadline(self._free_at, self._clock, self._sleep))

    def _tell(self, told: Path) -> None:
        written = told.with_suffix(".new")
        with suppress(OSError):  # the benchmark is over
            written.write_text(json.dumps({"forwards": self.forwards, "overruns": self.overruns}))
            written.replace(told)


@dataclass(frozen=True, slots=True)
class Deadline:
    """A forward that is over at the time `at` of a clock."""

    at: float
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    def ready(self) -> bool:
        """Whether the time has come."""
        return self.clock() >= self.at

    def wait(self) -> float:
        """Sleep until then."""
        left = self.at - self.clock()
        if left > _SPIN_S:
            self.sleep(left - _SPIN_S)
        while self.clock() < self.at:
            pass
        return self.at
