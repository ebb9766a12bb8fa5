"""Answers kept in a file as they come, so that a long comparison can end at any time and go on later.

Whoever asks in the same order again gets the same answers, without asking anybody. Knows samples, not what
they are for.
"""

from collections import Counter
from pathlib import Path

import msgspec

from ssd_serve.bench.peers.client import Sample
from ssd_serve.errors import UserError


class _Line(msgspec.Struct, frozen=True):
    key: str
    sample: Sample


class Journal:
    """Answers by key, of each in the order in which they were measured.

    `subject` names what the answers depend on beside their keys: a file of another one is refused, and so is
    nothing else, so that a comparison can be extended.
    """

    def __init__(self, file: Path, subject: str) -> None:
        self._file = file
        self._told: dict[str, list[Sample]] = {}
        self._given: Counter[str] = Counter()
        if not file.exists():
            file.write_bytes(msgspec.json.encode(subject) + b"\n")
            return
        first, *lines = file.read_bytes().split(b"\n")
        if msgspec.json.decode(first) != subject:
            raise UserError(f"{file} has answers of another code or another pair: give another --work")
        for line in lines[:-1]:  # what stands behind the last end of a line was cut off
            found = msgspec.json.decode(line, type=_Line)
            self._told.setdefault(found.key, []).append(found.sample)
        file.write_bytes(b"\n".join([first, *lines[:-1], b""]))

    def next(self, key: str) -> Sample | None:
        """The next known answer to this, or None: then it must be measured and `add`ed."""
        known, given = self._told.get(key, []), self._given[key]
        if given >= len(known):
            return None
        self._given[key] += 1
        return known[given]

    def add(self, key: str, sample: Sample) -> None:
        """Keep an answer that was measured."""
        with self._file.open("ab") as out:
            out.write(msgspec.json.encode(_Line(key, sample)) + b"\n")
        self._told.setdefault(key, []).append(sample)
        self._given[key] += 1

    @property
    def answers(self) -> int:
        """How many it has."""
        return sum(map(len, self._told.values()))
