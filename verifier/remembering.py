"""Remembers on disk what forwards of a model cost on a device, so that the next start need not measure it
again.

A file is named by everything that the times depend on: the model's sizes and dtype, the device, the processor
and the versions. What is there is checked with a few forwards before it is used; what cannot be read or
written is only a measurement more. Knows files and timings, not models.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from ssd_serve.logs import Logger
from ssd_serve.verifier.cost import Timing

_FORMAT = 1
_MOST_OFF = 1.5
"""Remembered times that differ by more than this factor from a few forwards now are measured again."""


class _File(msgspec.Struct):
    format: int
    timings: list[tuple[int, int, float]]


class TimingFiles:
    """Timings in `folder`."""

    def __init__(self, folder: Path, log: Logger) -> None:
        self._folder = folder
        self._log = log

    def timings(
        self,
        identity: Mapping[str, object],
        measure: Callable[[], Sequence[Timing]],
        probe: Callable[[], Sequence[Timing]],
    ) -> Sequence[Timing]:
        """What is remembered, if `probe` agrees with it; else what `measure` finds, which is remembered.

        `identity` is what the times depend on.
        """
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()
        path = self._folder / f"cost-{digest[:24]}.json"
        known = _read(path)
        if known and _agree(known, probe()):
            return known
        found = measure()
        self._write(path, found)
        return found

    def _write(self, path: Path, timings: Sequence[Timing]) -> None:
        data = msgspec.json.encode(
            _File(_FORMAT, [(each.rows, each.context, each.seconds) for each in timings])
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(data)
            os.replace(file.name, path)
        except OSError as error:
            self._log.debug("step times are not remembered", reason=str(error))


def _read(path: Path) -> list[Timing]:
    """The timings of a file; none where it is absent, broken or of another format."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except (OSError, msgspec.DecodeError):
        return []
    sound = all(rows > 0 and context >= 0 and seconds > 0 for rows, context, seconds in file.timings)
    return [Timing(*each) for each in file.timings] if sound and file.format == _FORMAT else []


def _agree(known: Sequence[Timing], probed: Sequence[Timing]) -> bool:
    """Whether every probed time is there and about right."""
    seconds = {(each.rows, each.context): each.seconds for each in known}
    return all(
        1 / _MOST_OFF < each.seconds / seconds.get((each.rows, each.context), float("inf")) < _MOST_OFF
        for each in probed
    )
