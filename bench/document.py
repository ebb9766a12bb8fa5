"""Result files and the documents that show them: reading one, replacing a block between markers.

Knows files and text, not what was measured.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from ssd_serve.errors import UserError

Result = TypeVar("Result")


def read_json(path: Path, command: str) -> dict[str, object]:
    """The JSON of a result file that `command` has written."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise UserError(f"{path} is not a result of `{command}`: {error}") from error


def write_json(result: Mapping[str, object], path: Path) -> None:
    """Write a result file; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def read_as(kind: type[Result], result: Mapping[str, object], command: str) -> Result:
    """A result of `command` as its type; fields that the type lacks are left alone."""
    try:
        return msgspec.convert(result, type=kind)
    except msgspec.ValidationError as error:
        raise UserError(f"this is not a result of `{command}`: {error}") from error


def replace_between(begin: str, end: str, document: str, text: str) -> str:
    """The document with the text between its two markers."""
    before, found, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise UserError(f"the document has no block between {begin} and {end}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"
