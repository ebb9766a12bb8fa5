"""Small files of measurements in the cache folder, each named by what it depends on."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from ssd_serve.base.logs import Logger
from ssd_serve.base.trusted_files import make_folder, read_own

StoredT = TypeVar("StoredT", bound=msgspec.Struct)


def stored_path(folder: Path, kind: str, identity: Mapping[str, object]) -> Path:
    """Return the path of a file of this kind for everything that its content depends on."""
    text = json.dumps(identity, sort_keys=True, default=str)
    return folder / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def write_stored(path: Path, content: msgspec.Struct, log: Logger | None = None) -> None:
    """Replace a file; where that is not possible the next start measures again."""
    try:
        make_folder(path.parent)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(msgspec.json.encode(content))
        os.replace(file.name, path)
    except OSError as error:
        if log is not None:
            log.debug("what was measured is not remembered", reason=str(error))


def read_stored(path: Path, kind: type[StoredT]) -> StoredT | None:
    """Return a file's content; None if it is absent, broken or of another format."""
    try:
        return msgspec.json.decode(read_own(path), type=kind)
    except (OSError, msgspec.DecodeError):
        return None
