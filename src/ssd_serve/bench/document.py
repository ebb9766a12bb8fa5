"""Result files and the documents that show them: reading one, replacing a block between markers.

Knows files and text, not what was measured.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from ssd_serve.base.errors import UserError

Result = TypeVar("Result")


def read_json(path: Path, command: str) -> dict[str, object]:
    """The JSON of a result file that `command` has written."""
    return read_file(dict[str, object], path, command)


def read_file(kind: type[Result], path: Path, command: str) -> Result:
    """A result file that `command` has written, as its type."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise UserError(f"{path} is not a result of `{command}`: {error}") from error


def say(text: str) -> None:
    """A line on stderr while something is measured: lines and no bar, because log files keep them."""
    print(text, file=sys.stderr, flush=True)


def make_output_folder(folder: Path, option: str) -> None:
    """Make the folder that `option` names, if it is not there. Raises `UserError` where it cannot be one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option} {folder} cannot be a folder to write to: {error.strerror}") from error


def write(text: str, path: Path | None) -> None:
    """Write a file, where one is wanted; its folder is made."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def show(
    result: Mapping[str, object],
    path: Path | None,
    text: Callable[[Mapping[str, object]], str] | None = None,
) -> None:
    """Write the result file, where one is wanted, and print the text; where neither is, print the result.
    The file is there before the text is made, which may fail."""
    as_json = json.dumps(result, indent=1)
    write(as_json + "\n", path)
    if text is not None or path is None:
        print(as_json if text is None else text(result))


def read_as(kind: type[Result], result: Mapping[str, object], command: str) -> Result:
    """A result of `command` as its type; fields that the type lacks are left alone."""
    try:
        return msgspec.convert(result, type=kind)
    except msgspec.ValidationError as error:
        raise UserError(f"this is not a result of `{command}`: {error}") from error


def replace_block(file: Path, name: str, text: str) -> None:
    """Put the text into a document, between the two markers of this name."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, found, rest = file.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise UserError(f"{file} has no block between {begin} and {end}")
    file.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")
