"""How `ssd settings` prints: a table for people, Markdown for documents, JSON and .env files for machines.

Secrets arrive here masked already.
"""

import json
import re
import shutil
import textwrap
from collections.abc import Sequence

from ssd_serve.base.settings import SECRETS
from ssd_serve.base.settings_sources import Origin

_NARROWEST_MEANING = 30


def as_json(rows: Sequence[Origin]) -> str:
    """One object by variable name."""
    table = {
        row.variable: {"value": row.shown, "origin": row.origin, "flag": row.flag, "meaning": row.meaning}
        for row in rows
    }
    return json.dumps(table, indent=2)


def as_markdown(rows: Sequence[Origin]) -> str:
    """The table of docs/settings.md; give it the rows of plain defaults."""
    lines = ["| variable | flag | default | meaning |", "|---|---|---|---|"]
    for row in rows:
        default = "" if row.shown == "-" else f"`{row.shown}`"
        lines.append(f"| `{row.variable}` | `{row.flag}` | {default} | {row.meaning} |")
    return "\n".join(lines)


def as_env(rows: Sequence[Origin]) -> str:
    """A .env file with every setting; defaults, and secrets, are comments."""
    lines = ["# Made by `ssd settings --env`. To change a setting, take away its #. Keep secrets out of git."]
    for row in rows:
        value = "" if row.shown == "-" or row.name in SECRETS else row.shown
        quoted = value if re.fullmatch(r"[\w./:*,~+-]*", value) else f"'{value}'"
        in_force = row.origin != "default" and row.name not in SECRETS
        lines += ["", f"# {row.meaning}", f"{'' if in_force else '#'}{row.variable}={quoted}"]
    return "\n".join(lines)


def as_table(rows: Sequence[Origin], width: int | None = None) -> str:
    """Columns as wide as they need, the meaning wrapped into what is left of the terminal."""
    cells = [("VARIABLE", "VALUE", "FROM", "MEANING")]
    cells += [(row.variable, row.shown, row.origin, row.meaning) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    indent = sum(widths) + 2 * len(widths)
    total = width if width is not None else shutil.get_terminal_size((120, 24)).columns
    lines: list[str] = []
    for row in cells:
        start = "".join(cell.ljust(size) + "  " for cell, size in zip(row[:3], widths, strict=True))
        wrapped = textwrap.wrap(row[3], max(_NARROWEST_MEANING, total - indent)) or [""]
        lines.append((start + wrapped[0]).rstrip())
        lines += [" " * indent + rest for rest in wrapped[1:]]
    lines.append("")
    lines.append("Every variable is also a flag: SSD_DRAFT_WIDTH is --draft-width. Flags win over variables.")
    return "\n".join(lines)
