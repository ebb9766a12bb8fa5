"""A stage of `ssd bench modes` whose runs are kept in a journal, within a time that is given.

A comparison takes the same way through the same runs again: those that are known are told, the others are
run. Knows ways and prompts by their names.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ssd_serve.bench.journal import Journal, OutOfTimeError
from ssd_serve.bench.modes import Entry, ModesStage, Share
from ssd_serve.bench.prompts import Chosen, Prompt
from ssd_serve.bench.timed_request import TimedRequest


@dataclass(slots=True)
class Sitting:
    """One of the times at which a comparison is measured; `minutes`: how long it may run."""

    journal: Journal[TimedRequest]
    minutes: float | None = None
    measured: int = 0
    _began: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        """Whether the time is."""
        return self.minutes is not None and time.monotonic() - self._began > 60 * self.minutes


class KeptStage:
    """The same stage to those who use it."""

    def __init__(self, stage: ModesStage, sitting: Sitting) -> None:
        self.setting, self.fan_out = stage.setting, stage.fan_out
        self.beside: Share = stage.beside
        self.alone: Sequence[Share] = stage.alone
        self._stage = stage
        self._sitting = sitting

    def run(self, entry: Entry, prompt: Prompt, temperature: float) -> TimedRequest:
        """What is known of this run, or what it gives now."""
        key = f"{self.setting} {temperature:g} {entry.way.label} {entry.share} {_name(prompt)}"
        known = self._sitting.journal.next(key)
        if known is not None:
            return known
        if self._sitting.over:
            raise OutOfTimeError
        found = self._stage.run(entry, prompt, temperature)
        self._sitting.measured += 1
        self._sitting.journal.add(key, found)
        return found


def read_chosen(file: Path) -> dict[float, Chosen] | None:
    """Prompts that an earlier sitting has chosen."""
    return msgspec.json.decode(file.read_bytes(), type=dict[float, Chosen]) if file.exists() else None


def write_chosen(file: Path, chosen: dict[float, Chosen]) -> None:
    """For later sittings."""
    unfinished = file.with_suffix(".part")
    unfinished.write_bytes(msgspec.json.encode(chosen))
    unfinished.rename(file)


def _name(prompt: Prompt) -> str:
    return hashlib.sha256(msgspec.json.encode(prompt)).hexdigest()[:16]
