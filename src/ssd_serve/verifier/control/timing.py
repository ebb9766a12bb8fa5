"""Remembers on disk what forwards of a model cost on a device, and what each layout gave there, so that the
next start need not find out again.

A file is named by everything that the times depend on: the model's sizes and dtype, the device, the processor
and the versions. What is there is checked with a few forwards before it is used; what cannot be read or
written is only a measurement more. Knows files and timings, not models.
"""

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch

from ssd_serve.base.cost import CostTable, Timing
from ssd_serve.base.logs import Logger
from ssd_serve.base.trusted_files import make_folder, read_own
from ssd_serve.models.interface import Model
from ssd_serve.models.warmup import LONG_CONTEXT, SHORT_CONTEXT, measure_steps

_FORMAT = 1
_MAX_GAIN = 1000.0
_TRIES = 3
_MAX_OFF = 1.5
"""Remembered times that differ by more than this factor from a few forwards now are measured again."""


class _File(msgspec.Struct):
    format: int
    timings: list[tuple[int, int, float]]


class _Gains(msgspec.Struct):
    format: int
    gains: dict[int, dict[str, float]]


class TimingFiles:
    """Timings in `folder`."""

    def __init__(self, folder: Path, log: Logger) -> None:
        self._folder = folder
        self._log = log
        self.measured_otherwise = False
        """True if a remembered time has turned out to be different."""

    def timings(
        self,
        identity: Mapping[str, object],
        measure: Callable[[], Sequence[Timing]],
        probe: Callable[[], Sequence[Timing]],
    ) -> Sequence[Timing]:
        """Return remembered timings if `probe` agrees with them, else the result of `measure`.

        A measurement is remembered if `probe` agrees with it afterwards. If it never does, other work
        disturbs the machine: the least of all times is returned, and the next start measures again.
        `identity`: everything that the times depend on.
        """
        path = self._folder / f"cost-{_digest(identity)}.json"
        known = _read(path)
        if known and _agree(known, probe()):
            return known
        self.measured_otherwise = self.measured_otherwise or bool(known)
        found: list[Timing] = []
        for _ in range(_TRIES):
            measured, probed = measure(), probe()
            if _agree(measured, probed):
                self._write(path, measured)
                return measured
            found = least((*found, *measured, *probed))
        self._log.debug("step times are not remembered: other work disturbs this machine")
        return found

    def _write(self, path: Path, timings: Sequence[Timing]) -> None:
        _write(path, _File(_FORMAT, [(each.rows, each.context, each.seconds) for each in timings]), self._log)


class GainFile:
    """Measured gain of each mode by level of load, for one pair and its devices."""

    def __init__(self, folder: Path, identity: Mapping[str, object], log: Logger) -> None:
        self._path = folder / f"layouts-{_digest(identity)}.json"
        self._log = log
        self._written: dict[int, dict[str, float]] = {}

    def read(self) -> dict[int, dict[str, float]]:
        """Return the stored gains; empty if there is no readable file."""
        try:
            file = msgspec.json.decode(read_own(self._path), type=_Gains)
        except (OSError, msgspec.DecodeError):
            return {}
        gains = [(load, gain) for load, each in file.gains.items() for gain in each.values()]
        sound = all(load > 0 and 0 <= gain < _MAX_GAIN for load, gain in gains)
        return file.gains if sound and file.format == _FORMAT else {}

    def write(self, gains: Mapping[int, Mapping[str, float]]) -> None:
        """Remember these instead; nothing is written while they stay the same."""
        content = {load: dict(each) for load, each in gains.items()}
        if content != self._written:
            self._written = content
            _write(self._path, _Gains(_FORMAT, content), self._log)


def _digest(identity: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _write(path: Path, content: msgspec.Struct, log: Logger) -> None:
    try:
        make_folder(path.parent)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(msgspec.json.encode(content))
        os.replace(file.name, path)
    except OSError as error:
        log.debug("what was measured is not remembered", reason=str(error))


def _read(path: Path) -> list[Timing]:
    """The timings of a file; none where it is absent, broken or of another format."""
    try:
        file = msgspec.json.decode(read_own(path), type=_File)
    except (OSError, msgspec.DecodeError):
        return []
    sound = all(rows > 0 and context >= 0 and seconds > 0 for rows, context, seconds in file.timings)
    return [Timing(*each) for each in file.timings] if sound and file.format == _FORMAT else []


def least(timings: Iterable[Timing]) -> list[Timing]:
    """The least of each kind: what disturbs a moment only lengthens it."""
    found: dict[tuple[int, int], Timing] = {}
    for each in timings:
        key = each.rows, each.context
        found[key] = min(each, found.get(key, each), key=lambda timing: timing.seconds)
    return list(found.values())


def _agree(known: Sequence[Timing], probed: Sequence[Timing]) -> bool:
    """Return whether every probed time is known and about the same."""
    seconds = {(each.rows, each.context): each.seconds for each in known}
    return all(
        1 / _MAX_OFF < each.seconds / seconds.get((each.rows, each.context), float("inf")) < _MAX_OFF
        for each in probed
    )


ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_LONG_ROWS = (1, 8, 32)
_PROBED_ROWS = (1, 8)
_CONTEXTS = (SHORT_CONTEXT, LONG_CONTEXT)
_LEAST_S, _PROBE_S = 0.3, 0.05
"""Minimum seconds of each measurement and of a probe. A device with short steps is timed for more of them:
a busy moment is as long as many steps."""
_MOST_S = 2.0
"""Maximum seconds of each measurement: a busy moment is short compared with several long steps."""


def measure_cost(model: Model) -> CostTable:
    """Time forwards of some rows after a short context, and of a few after a long one."""
    return CostTable(_measure(model))


def remembered_timings(model: Model, device: str, files: TimingFiles) -> list[Timing]:
    """The same timings, from an earlier start where a few forwards agree with them. `device` names the cores
    in use."""
    return list(files.timings(identity(model, device), lambda: _measure(model), lambda: _probe(model)))


def identity(model: Model, device: str) -> dict[str, object]:
    """Return everything that step times depend on."""
    return {
        **asdict(model.facts),
        "device": device,
        "step": type(model).__name__,  # a wrapper may change the model's times
        "processor": platform.processor() or platform.machine(),
        "gpu": torch.cuda.get_device_name() if device.startswith("cuda") else "",
        "torch": torch.__version__,
        "ssd-serve": version("ssd-serve"),
    }


def _measure(model: Model) -> list[Timing]:
    short = measure_steps(model, ROWS, least_s=_LEAST_S, most_s=_MOST_S)
    longer = measure_steps(model, _LONG_ROWS, _CONTEXTS, least_s=_LEAST_S, most_s=_MOST_S)
    return least((*_timings(short), *_timings(longer)))


def _probe(model: Model) -> list[Timing]:
    return least(
        _timings(measure_steps(model, _PROBED_ROWS, _CONTEXTS, 2, least_s=_PROBE_S, most_s=_LEAST_S))
    )


def _timings(seconds: Mapping[tuple[int, int], Sequence[float]]) -> list[Timing]:
    return [Timing(*key, each) for key, repeats in seconds.items() for each in repeats]
