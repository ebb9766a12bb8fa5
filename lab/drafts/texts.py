"""Texts for drafts: files that are copied, files that are changed a little, structured data, and plain text.

Made from files that the embedded pair has not seen. Whether a model really copies is its own affair. Knows
text, no tokens.
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby

KINDS = ("code", "prose", "copying", "editing", "data")
_LINES, _BEGUN = 24, 3
_SHORTEST = 400


def prompt_of(kind: str, text: str) -> str | None:
    """The prompt of a kind that a file's text gives; None where it is too short for one."""
    lines = text.splitlines(keepends=True)
    start = next((place for place, line in enumerate(lines) if line.startswith(("def ", "class "))), None)
    part = lines[start : start + _LINES] if start is not None else []
    if len("".join(part)) < _SHORTEST:
        return None
    whole = "".join(part)
    if kind == "code":
        return whole
    if kind == "prose":
        return _comment(lines)
    if kind == "data":
        return _records(whole)
    again = part if kind == "copying" else _renamed(part)
    return f"{whole}\n\n" + "".join(again[:_BEGUN]) if again is not None else None


def _comment(lines: Sequence[str]) -> str | None:
    """The longest run of comment lines, without its second half."""
    runs = [list(run) for comments, run in groupby(lines, lambda line: line.startswith("#")) if comments]
    longest = max(runs, key=len, default=[])
    text = "".join(longest[: (len(longest) + 1) // 2])
    return text if len(text) >= _SHORTEST // 2 else None


def _renamed(lines: Sequence[str]) -> list[str] | None:
    """The same lines with another name for what they mention most."""
    names = re.findall(r"\b[a-z_]{4,}\b", "".join(lines[_BEGUN:]))
    mentioned = [name for name in names if name in "".join(lines[:_BEGUN])]
    if not mentioned:
        return None
    name = max(sorted(set(mentioned)), key=mentioned.count)
    return [re.sub(rf"\b{name}\b", f"{name}_value", line) for line in lines]


def _records(text: str) -> str:
    """The beginning of a list with a record for each name of the text."""
    names = list(dict.fromkeys(re.findall(r"\b[a-zA-Z_]{3,}\b", text)))[:8]
    records = [{"name": name, "kind": "name", "length": len(name), "used": True} for name in names]
    return json.dumps(records, indent=4)[:-2] + ",\n    {\n"


def prompts_of(kind: str, texts: Sequence[str], count: int) -> Iterator[str]:
    """The first so many."""
    found = (prompt for text in texts if (prompt := prompt_of(kind, text)) is not None)
    for _, prompt in zip(range(count), found, strict=False):
        yield prompt
