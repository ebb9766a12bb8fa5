"""The file of a comparison: every single answer, kept after every question, so that a run can go on later."""

import json
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ssd_serve.base.errors import UserError
from ssd_serve.bench.peers.engines import PeerMode
from ssd_serve.bench.peers.figures import AnswerRow


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a peer's mode for so many users, and the tokens/s of all shapes that were tried."""

    users: int
    busy: str
    name: str
    best: PeerMode
    tried: dict[str, float]


class Record(msgspec.Struct, kw_only=True):
    """Holds all measurements. `setup` is the same in all sittings; a sitting is one run of the command."""

    benchmark: str = "peers"
    setup: dict[str, object]
    sittings: list[dict[str, object]] = []
    tuned: list[Tuned] = []
    answers: list[AnswerRow] = []

    def write(self, path: Path | None) -> None:
        """Write the file, if there is a path, whole or not at all."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch = path.with_name(f"{path.name}.new")
            scratch.write_text(json.dumps(msgspec.to_builtins(self), indent=1) + "\n")
            scratch.replace(path)

    def answered(self, group: str, busy: str, modes: Iterable[str]) -> bool:
        """True if all these modes have answered the group in one sitting."""
        wanted = set(modes)
        found: dict[int, set[str]] = {}
        for row in self.answers:
            if row.group == group and row.busy == busy:
                found.setdefault(row.sitting, set()).add(row.name)
        return any(wanted <= names for names in found.values())


def read_record(path: Path) -> Record:
    """Read a file of this command. Raises `UserError` for another one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{path} is no result of ssd bench peers ({error}): name another file") from error


def open_record(path: Path | None, setup: dict[str, object]) -> Record:
    """Return the record that a file has, or a new one.

    Raises `UserError` for a file that was measured with another set-up.
    """
    if path is None or not path.exists():
        return Record(setup=setup)
    found = read_record(path)
    for name, value in setup.items():
        if found.setup.get(name) != value:
            raise UserError(
                f"{path} was measured with {name} {found.setup.get(name)}, not {value}: name another file"
            )
    return found
