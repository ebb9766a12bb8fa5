"""The product names no benchmark and no recipe; the layers of packages are a contract in `pyproject.toml`."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "ssd_serve"
LAZY_COMMANDS = "app/cli/main.py"
"""Imports the commands of `ssd bench` and `ssd recipe` by name, when one of them is called."""


def outside_names(source: str) -> Iterator[str]:
    """Yield strings that name modules of `bench` or `recipes`."""
    for node in ast.walk(ast.parse(source)):
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and value.startswith(("ssd_serve.bench.", "ssd_serve.recipes.")):
            yield value


def test_only_the_command_line_names_benchmarks_and_recipes() -> None:
    named: dict[str, list[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE)
        if path.parts[0] not in ("bench", "recipes"):
            named[str(path)] = [*outside_names(file.read_text(encoding="utf-8"))]
    assert {file: names for file, names in named.items() if names} == {
        LAZY_COMMANDS: ["ssd_serve.bench.commands", "ssd_serve.recipes.commands"],
        "base/settings.py": ["ssd_serve.bench.emulated:device:TABLE"],
    }
