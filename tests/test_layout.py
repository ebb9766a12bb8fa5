"""Classes that are built in one place, and names that are unique."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOORS = {
    "ssd_serve.verifier.engine": ("Engine", "src/ssd_serve/verifier/assembly.py"),
    "ssd_serve.verifier.control.planner": ("RoundPlanner", "src/ssd_serve/verifier/assembly.py"),
    "ssd_serve.verifier.scheduler": ("Scheduler", "src/ssd_serve/verifier/assembly.py"),
    "ssd_serve.verifier.round": ("Rounds", "src/ssd_serve/verifier/assembly.py"),
}
"""Module of each class that is built in one place, and that place."""
TESTS_OF_ONE_CLASS = {
    ("Scheduler", "tests/verifier/scheduler_factory.py"),
    ("RoundPlanner", "tests/verifier/test_planner.py"),
    ("RoundPlanner", "tests/fakes.py"),
    ("Rounds", "tests/verifier/test_device_placement.py"),
}


@cache
def sources() -> dict[str, str]:
    """The source of every Python file of the repository, each once, by its path."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}


def calls(tree: ast.Module, module: str, name: str) -> Iterator[ast.Call]:
    """Calls of a module's class by any name that the source has for it."""
    names, modules = set[str](), set[str]()
    package, _, last = module.rpartition(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == module:
            names |= {alias.asname or alias.name for alias in node.names if alias.name == name}
        elif isinstance(node, ast.ImportFrom) and node.module == package:
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == last}
        elif isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == module}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in names or called in {f"{each}.{name}" for each in modules}:
                yield node


@pytest.mark.parametrize("module", DOORS)
def test_each_part_of_an_engine_is_built_in_one_place(module: str) -> None:
    name, door = DOORS[module]
    naming = {path: ast.parse(source) for path, source in sources().items() if name in source}
    builders = {path for path, tree in naming.items() if [*calls(tree, module, name)]}
    assert builders - {door} == {path for each, path in TESTS_OF_ONE_CLASS if each == name}
