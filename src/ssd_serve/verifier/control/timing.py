"""Measures forwards of a model, and stores their times and the gains of modes for the next start.

A file is named by everything that the times depend on: the model's sizes and dtype, the device, the processor
and the versions. Stored times are checked with a few forwards before use, and measured again if the file cannot
be read.
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
from typing import Annotated, Literal, TypeVar

import msgspec
import torch

from ssd_serve.base.cost import CostTable, Timing
from ssd_serve.base.logs import Logger
from ssd_serve.base.trusted_files import make_folder, read_own
from ssd_serve.models.interface import Model
from ssd_serve.models.warmup import LONG_CONTEXT, SHORT_CONTEXT, measure_steps

_TRIES = 3
_MAX_OFF = 1.5
"""Stored times that differ by more than this factor from a few forwards now are measured again."""
_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Timings(msgspec.Struct):
    timings: list[tuple[_Count, Annotated[int, msgspec.Meta(ge=0)], Annotated[float, msgspec.Meta(gt=0)]]]
    """Rows, context and seconds."""
    format: Literal[1] = 1


class _Gains(msgspec.Struct):
    gains: dict[_Count, dict[str, Annotated[float, msgspec.Meta(ge=0, lt=1000)]]]
    format: Literal[1] = 1


FileT = TypeVar("FileT", _Timings, _Gains)


class TimingFiles:
    """Files of timings in `folder`."""

    def __init__(self, folder: Path, log: Logger) -> None:
        self._folder = folder
        self._log = log
        self.measured_otherwise = False
        """True if a stored time has turned out to be different."""

    def timings(
        self,
        identity: Mapping[str, object],
        measure: Callable[[], Sequence[Timing]],
        probe: Callable[[], Sequence[Timing]],
    ) -> Sequence[Timing]:
        """Return stored timings if `probe` agrees with them, else the result of `measure`.

        A measurement is stored if `probe` agrees with it afterwards. If it never does, other work disturbs the
        machine: the least of all times is returned, and the next start measures again.
        """
        path = self._folder / f"cost-{_digest(identity)}.json"
        stored = _read(path, _Timings)
        known = [Timing(*each) for each in stored.timings] if stored is not None else []
        if known and _agree(known, probe()):
            return known
        self.measured_otherwise = self.measured_otherwise or bool(known)
        found: list[Timing] = []
        for _ in range(_TRIES):
            measured, probed = measure(), probe()
            if _agree(measured, probed):
                content = [(each.rows, each.context, each.seconds) for each in measured]
                _write(path, _Timings(content), self._log)
                return measured
            found = _least((*found, *measured, *probed))
        self._log.debug("step times are not remembered: other work disturbs this machine")
        return found


class GainFile:
    """Measured gain of each mode by level of load, for one pair and its devices."""

    def __init__(self, folder: Path, identity: Mapping[str, object], log: Logger) -> None:
        self._path = folder / f"layouts-{_digest(identity)}.json"
        self._log = log
        self._written: dict[int, dict[str, float]] = {}

    def read(self) -> dict[int, dict[str, float]]:
        """Return the stored gains; empty if there is no readable file."""
        stored = _read(self._path, _Gains)
        return stored.gains if stored is not None else {}

    def write(self, gains: Mapping[int, Mapping[str, float]]) -> None:
        """Store these gains unless they are the stored ones."""
        content = {load: dict(each) for load, each in gains.items()}
        if content != self._written:
            self._written = content
            _write(self._path, _Gains(content), self._log)


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


def _read(path: Path, kind: type[FileT]) -> FileT | None:
    """Return a file's content; None if it is absent, broken or of another format."""
    try:
        return msgspec.json.decode(read_own(path), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def _least(timings: Iterable[Timing]) -> list[Timing]:
    """Return the least time of each kind: disturbances only lengthen a forward."""
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
    """Return the same timings, stored ones if a few forwards agree with them. `device` names the cores in
    use."""
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
    return _least((*_timings(short), *_timings(longer)))


def _probe(model: Model) -> list[Timing]:
    return _least(
        _timings(measure_steps(model, _PROBED_ROWS, _CONTEXTS, 2, least_s=_PROBE_S, most_s=_LEAST_S))
    )


def _timings(seconds: Mapping[tuple[int, int], Sequence[float]]) -> list[Timing]:
    return [Timing(*key, each) for key, repeats in seconds.items() for each in repeats]
