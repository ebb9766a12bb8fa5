"""The README's tables say what the code says, and what it links to exists."""

import re
from pathlib import Path

import pytest

from ssd_serve.cli import EXIT_CODES
from ssd_serve.models.config import SUPPORTED
from ssd_serve.resolving import origins, resolve
from ssd_serve.settings_table import as_markdown

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def block(readme: str, name: str) -> str:
    _, _, rest = readme.partition(f"<!-- {name}:begin -->")
    text, end, _ = rest.partition(f"<!-- {name}:end -->")
    assert end
    return text.strip()


def test_the_table_of_settings(readme: str) -> None:
    """Where this fails, paste what `ssd settings --markdown` prints."""
    assert block(readme, "settings") == as_markdown(origins(resolve({}), {}))


def test_the_table_of_exit_codes(readme: str) -> None:
    rows = [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES]
    assert block(readme, "exit-codes") == "\n".join(["| code | meaning |", "|---|---|", *rows])


def test_the_supported_architectures(readme: str) -> None:
    assert all(f"| `{name}` |" in readme for name in SUPPORTED)


def test_links_and_folders_exist(readme: str) -> None:
    links = re.findall(r"\]\(([^):]+)\)", readme)
    folders = re.findall(r"^(\w[\w/]*/)  ", readme, re.MULTILINE)
    assert len(links) > 2
    assert len(folders) > 10
    for name in [*links, *folders]:
        assert name.startswith("models/embedded") or (ROOT / name).exists(), name
