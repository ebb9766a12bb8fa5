"""Applies the steps of docs/adding.md to a copy of the sources.

Each run of the copy is a new process, so values that an import derives from a table are computed again.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.adding_page import section

ROOT = Path(__file__).parents[1]
_CODE = r"\n\n```(?:python|diff)\n(.*?)^```"
_FILE = re.compile(r"^`([\w/]+\.py)`:" + _CODE, re.MULTILINE | re.DOTALL)
_LINE = re.compile(
    r"^The line in `(\w+)` of `([\w/]+\.py)`, behind `(\w+)`:" + _CODE, re.MULTILINE | re.DOTALL
)
_CHANGE = re.compile(r"^The change in `([\w/]+\.py)`:\n\n```diff\n((?:-.*\n)+)((?:\+.*\n)+)```", re.MULTILINE)


class Clone:
    """A copy of the sources with one section's additions; unchanged files are links to the repository."""

    def __init__(self, heading: str, folder: Path) -> None:
        self._folder = folder
        skipped = shutil.ignore_patterns("__pycache__", "bench", "recipes")
        shutil.copytree(
            ROOT / "src" / "ssd_serve", folder / "ssd_serve", ignore=skipped, copy_function=os.symlink
        )
        text = section(heading)
        files, lines = _FILE.findall(text), _LINE.findall(text)
        changes: list[tuple[str, str, str]] = _CHANGE.findall(text)
        assert len(files) + len(changes) == 1
        assert lines
        for path, source in files:
            assert not self._place(path).exists()
            self._place(path).write_text(source, encoding="utf-8")
        for table, path, neighbour, line in lines:
            source = self._place(path).read_text(encoding="utf-8")
            self._replace(path, with_line(source, table, neighbour, line.removeprefix("+")))
        for path, removed, added in changes:
            source = self._place(path).read_text(encoding="utf-8")
            before, after = (re.sub("^[-+]", "", part, flags=re.MULTILINE) for part in (removed, added))
            assert source.count(before) == 1
            self._replace(path, source.replace(before, after))
        self.changed = {*(path for path, _ in files), *(line[1] for line in lines), *(c[0] for c in changes)}
        """Files of the repository that the section adds or changes."""

    def _replace(self, path: str, source: str) -> None:
        self._place(path).unlink()  # the copy has a link to the repository's file
        self._place(path).write_text(source, encoding="utf-8")

    def _place(self, path: str) -> Path:
        """Return the path in the copy for a path in the repository."""
        return self._folder / path.removeprefix("src/")

    def run(self, *arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": f"{self._folder}:{ROOT}", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout


def with_line(source: str, table: str, neighbour: str, line: str) -> str:
    """Return the source with a line added after the neighbour's, in a dictionary, a tuple of calls or a class."""
    ends = [end for name, end in _entries(ast.parse(source), table) if name == neighbour]
    (end,) = ends
    lines = source.splitlines(keepends=True)
    return "".join([*lines[:end], line, *lines[end:]])


def _entries(tree: ast.Module, table: str) -> list[tuple[str, int]]:
    """Return the names of the entries and their last lines."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == table:
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            return [(ast.unparse(each.target), each.end_lineno or 0) for each in fields]
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == table:
            value = node.value
            if isinstance(value, ast.Dict):
                pairs = zip(value.keys, value.values, strict=True)
                return [(ast.literal_eval(key), each.end_lineno or 0) for key, each in pairs if key]
            assert isinstance(value, ast.Tuple)
            calls = [each for each in value.elts if isinstance(each, ast.Call)]
            return [(ast.literal_eval(each.args[0]), each.end_lineno or 0) for each in calls]
    raise AssertionError(f"there is no {table}")
