"""Answers kept in a file as they come, so that a long measurement can end at any time and go on later.

Whoever asks in the same order again gets the same answers, without measuring anything. Knows neither what is
asked nor what an answer holds.
"""

import hashlib
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from ssd_serve.base.errors import SsdError, UserError
from ssd_serve.bench.document import make_output_folder

Answer = TypeVar("Answer")


class OutOfTimeError(SsdError):
    """The time that was given is over; what has been measured is kept."""

    def __init__(self) -> None:
        super().__init__("the given time is over; the same command goes on where it ends")


class TimeGiven:
    """How long may be measured from now on; None: as long as it takes."""

    def __init__(self, minutes: float | None) -> None:
        self._minutes = minutes
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    def require(self) -> None:
        """Raise `OutOfTimeError` when it is over."""
        if self._minutes is not None and self.seconds > 60 * self._minutes:
            raise OutOfTimeError


class _Line(msgspec.Struct, frozen=True):
    key: str
    sample: msgspec.Raw


class Journal(Generic[Answer]):
    """Answers by key, of each in the order in which they were measured.

    `subject` names what the answers depend on beside their keys: a file of another one is refused, and so is
    nothing else, so that a measurement can be extended. `earlier` answers were in the file. Raises
    `UserError` for a file that cannot be read.
    """

    def __init__(self, file: Path, subject: str, kind: type[Answer]) -> None:
        self._file = file
        self._told: dict[str, list[Answer]] = {}
        self._given: Counter[str] = Counter()
        try:
            self._read(subject, kind)
        except (OSError, msgspec.DecodeError) as error:
            raise UserError(f"{file} cannot be read ({error}): give another --work") from error
        self.earlier = self.answers

    def _read(self, subject: str, kind: type[Answer]) -> None:
        file = self._file
        if not file.exists():
            file.write_bytes(msgspec.json.encode(subject) + b"\n")
            return
        first, *lines = file.read_bytes().split(b"\n")
        if msgspec.json.decode(first) != subject:
            raise UserError(f"{file} has answers of another code, command or pair: give another --work")
        for line in lines[:-1]:  # what stands behind the last end of a line was cut off
            found = msgspec.json.decode(line, type=_Line)
            self._told.setdefault(found.key, []).append(msgspec.json.decode(found.sample, type=kind))
        file.write_bytes(b"\n".join([first, *lines[:-1], b""]))

    def next(self, key: str) -> Answer | None:
        """The next known answer to this, or None: then it must be measured and `add`ed."""
        known, given = self._told.get(key, []), self._given[key]
        if given >= len(known):
            return None
        self._given[key] += 1
        return known[given]

    def known(self, key: str) -> int:
        """How many answers to this `next` still has."""
        return len(self._told.get(key, [])) - self._given[key]

    def add(self, key: str, answer: Answer) -> None:
        """Keep an answer that was measured."""
        with self._file.open("ab") as out:
            line = _Line(key, msgspec.Raw(msgspec.json.encode(answer)))
            out.write(msgspec.json.encode(line) + b"\n")
        self._told.setdefault(key, []).append(answer)
        self._given[key] += 1

    @property
    def answers(self) -> int:
        """How many it has."""
        return sum(map(len, self._told.values()))


def read_kept(file: Path, kind: type[Answer]) -> Answer | None:
    """What an earlier sitting has written there, if any. Raises `UserError` for a file that cannot be
    read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind) if file.exists() else None
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{file} cannot be read ({error}): give another --work") from error


def write_kept(file: Path, value: object) -> None:
    """For later sittings: all of it or nothing."""
    unfinished = file.with_suffix(".part")
    unfinished.write_bytes(msgspec.json.encode(value))
    unfinished.rename(file)


def name_of(value: object) -> str:
    """A short name that follows from what a value holds."""
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:16]


@contextmanager
def work_folder(work: Path | None) -> Generator[Path]:
    """The folder of what a measurement writes: the given one, which stays, or one that goes with the run.
    Raises `UserError` where it cannot be one."""
    if work is not None:
        make_output_folder(work, "--work")
        yield work.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="ssd-bench-") as folder:
        yield Path(folder)
