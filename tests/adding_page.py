"""Runs the code of docs/adding.md: a file and its line in a registry."""

import ast
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "adding.md"
_CODE = r"\n\n```python\n(.*?)^```"
_FILE = re.compile(r"^`([\w/]+)\.py`:" + _CODE, re.MULTILINE | re.DOTALL)
_POINTS = re.compile(r'^```toml\n\[project\.entry-points\."(.*)"\]\n(.*) = "(.*)"\n```', re.MULTILINE)
_LINE = re.compile(r"^The line in `(\w+)` of `([\w/]+)\.py`:" + _CODE, re.MULTILINE | re.DOTALL)


def section(heading: str) -> str:
    """Return the part of the page below a heading of the second level."""
    return PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def follow(heading: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the section's file to a folder and add its line to the registry.

    For the length of a test, the file's package is also found in the folder.
    """
    ((path, source),) = _FILE.findall(section(heading))
    ((table, place, line),) = _LINE.findall(section(heading))
    (folder / f"{Path(path).name}.py").write_text(source, encoding="utf-8")
    package = import_module(_module(str(Path(path).parent)))
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    _forget(_module(path), monkeypatch)
    (entry,) = ast.literal_eval("{" + line + "}").items()
    monkeypatch.setitem(getattr(import_module(_module(place)), table), *entry)


def install(heading: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the section's file to a folder as an installed package with the page's entry point.

    The package is found for the length of a test.
    """
    ((path, source),) = _FILE.findall(section(heading))
    (points,) = _POINTS.findall(section(heading))
    name = Path(path).name
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    described = folder / f"{name}-1.0.dist-info"
    described.mkdir()
    group, key, value = points
    for file, text in (
        ("METADATA", f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n"),
        ("entry_points.txt", f"[{group}]\n{key} = {value}\n"),
    ):
        (described / file).write_text(text, encoding="utf-8")

    _forget(name, monkeypatch)
    monkeypatch.syspath_prepend(str(folder))


def _forget(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the module be imported again, and restore the entry of `sys.modules` after the test."""
    monkeypatch.setitem(sys.modules, module, sys)
    del sys.modules[module]


def _module(path: str) -> str:
    return path.removeprefix("src/").replace("/", ".")
