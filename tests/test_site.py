"""The documentation site builds with strict links, and the commands of its tutorials are those of `ssd`."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ssd_serve.app.cli.main import build_parser

ROOT = Path(__file__).parents[1]
_COMMAND = re.compile(r"^\.venv/bin/ssd (.*)$", re.MULTILINE)
COMMANDS = _COMMAND.findall((ROOT / "docs" / "tutorials.md").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_site_builds_with_strict_links(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Four tutorials" in (tmp_path / "tutorials.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_tutorials_have_known_flags(command: str) -> None:
    assert build_parser().parse_args(shlex.split(command)).run is not None
