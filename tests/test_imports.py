"""Imports between rooms go one way: what serves a token knows neither benchmarks nor experiments."""

import ast
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OUTSIDE = ("bench", "lab", "recipes")
LINKED = sorted(path.name for path in (ROOT / "src" / "ssd_serve").iterdir() if path.is_symlink())
PRODUCT = ["src", *(room for room in LINKED if room not in OUTSIDE)]
NAMES_MODULES = "src/ssd_serve/cli/main.py"
"""Imports the commands of `ssd bench` and `ssd recipe` by name, when one of them is called."""


def sources(room: str) -> Iterator[Path]:
    """The modules of a room; the links in `src/ssd_serve` are not followed."""
    for folder, _, files in os.walk(ROOT / room):
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def imports(source: str) -> Iterator[str]:
    """Every module or name that a source imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted_strings(source: str) -> Iterator[str]:
    """Every string of a source that may be the name of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            yield node.value


def of_rooms(names: Iterator[str], rooms: Sequence[str]) -> list[str]:
    """Those of the names that are modules, or names in modules, of these rooms."""
    pattern = re.compile(rf"(ssd_serve\.)?({'|'.join(rooms)})(\.\w+)*")
    return [name for name in names if pattern.fullmatch(name)]


def wrong(
    room: str, found: Callable[[str], Iterator[str]], others: Sequence[str] = OUTSIDE
) -> dict[str, list[str]]:
    """What each module of the room has of other rooms, where it has any."""
    named = {
        str(file.relative_to(ROOT)): of_rooms(found(file.read_text(encoding="utf-8")), others)
        for file in sources(room)
    }
    assert named
    return {file: names for file, names in named.items() if names}


@pytest.mark.parametrize("room", PRODUCT)
def test_the_product_imports_no_benchmark_experiment_or_recipe(room: str) -> None:
    assert wrong(room, imports) == {}


@pytest.mark.parametrize("room", PRODUCT)
def test_only_the_command_line_names_modules_of_others(room: str) -> None:
    """As strings, to import them when they are called."""
    named = wrong(room, dotted_strings)
    assert named == (
        {NAMES_MODULES: ["ssd_serve.bench.commands", "ssd_serve.recipes.commands"]} if room == "src" else {}
    )


@pytest.mark.parametrize(("room", "others"), [("bench", ["lab"]), ("recipes", ["lab", "bench"])])
def test_what_is_installed_does_not_import_what_is_not(room: str, others: list[str]) -> None:
    assert wrong(room, imports, others) == {}


@pytest.mark.parametrize(
    "source",
    [
        "import lab",
        "import ssd_serve.bench.rig as rig",
        "from ssd_serve import bench",
        "from ssd_serve.recipes.corpus import standard_library",
        "def late():\n    from lab.faults.report import table",
    ],
)
def test_an_import_is_found_in_every_form(source: str) -> None:
    assert of_rooms(imports(source), OUTSIDE)
    assert not of_rooms(imports("from ssd_serve.labels import lab_name\nimport benchmark"), OUTSIDE)
