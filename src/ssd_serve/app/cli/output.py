"""Output of `ssd settings`, `ssd version --full` and `ssd completion`."""

import json
import platform
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from ssd_serve.base.devices import this_machine
from ssd_serve.base.settings import SECRETS
from ssd_serve.base.settings_sources import Origin
from ssd_serve.base.version import __version__

_NARROWEST_MEANING = 30


def as_json(rows: Sequence[Origin]) -> str:
    """JSON object by variable name."""
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


_PACKAGES = (
    *("torch", "triton", "flashinfer-python", "ray", "llguidance", "tokenizers", "safetensors", "numpy"),
    *("huggingface-hub", "fastapi", "starlette", "uvicorn", "pydantic", "msgspec"),
)


def full_version() -> dict[str, object]:
    """Versions, of packages that are not here null, and what the machine has."""
    machine = this_machine()
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(machine.cores),
        "gpus": machine.gpus,
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


SHELLS = ("bash", "zsh", "fish")
_BASH = """_ssd() {{
  local command="${{COMP_WORDS[1]}}" words="{commands}"
  if [ "$COMP_CWORD" -gt 1 ]; then
    case "$command" in
{cases}
      *) words="" ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
  [ "${{#COMPREPLY[@]}}" -gt 0 ] || compopt -o default
}}
complete -F _ssd ssd
"""


def completion(shell: str, words: Mapping[str, Sequence[str]]) -> str:
    """The script for one of the `SHELLS`, which its user's start-up file evaluates. `words`: by command, its
    flags and what may follow it."""
    if shell == "fish":
        return _fish(words)
    cases = "\n".join(f'      {name}) words="{" ".join(each)}" ;;' for name, each in words.items())
    script = _BASH.format(commands=" ".join(words), cases=cases)
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


def _fish(words: Mapping[str, Sequence[str]]) -> str:
    lines = [f"complete -c ssd -n __fish_use_subcommand -f -a '{' '.join(words)}'"]
    for name, each in words.items():
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        lines += [f"complete -c ssd {seen} -l {flag[2:]}" for flag in each if flag.startswith("--")]
        others = [word for word in each if not word.startswith("--")]
        lines += [f"complete -c ssd {seen} -f -a '{' '.join(others)}'"] if others else []
    return "\n".join(lines) + "\n"
