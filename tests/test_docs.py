"""The documents say what the code says, and what they link to exists."""

import re
from functools import cache
from pathlib import Path

import pytest

from ssd_serve.base.messages import DecisionReason
from ssd_serve.base.settings import PREFIX, Settings
from ssd_serve.models.architectures.registry import ARCHITECTURES
from ssd_serve.sampling.parameters import PARAMETERS
from tests.generated_docs import DOCS, TABLES, block

ROOT = DOCS.parent
PAGES = sorted(DOCS.glob("*.md"))
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    ROOT / "deploy" / "README.md",
    *PAGES,
]
MAX_LINES, LONGEST_LINE = 150, 400
LINK = re.compile(r"\]\(([^()\s]+)\)")


def text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def by_path(file: Path) -> str:
    return str(file.relative_to(ROOT))


@cache
def anchors(file: Path) -> frozenset[str]:
    """The names under which a page's headings can be reached, as GitHub makes them."""
    outside_code = re.sub(r"^```.*?^```", "", text(file), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", outside_code, re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


@pytest.mark.parametrize("name", TABLES)
def test_generated_tables(name: str) -> None:
    """Where this fails, run `.venv/bin/python -m tests.generated_docs`."""
    assert block(text(DOCS / f"{name}.md"), name) == TABLES[name]()


def test_the_supported_architectures() -> None:
    models = text(DOCS / "models.md")
    assert all(f"| `{name}` |" in models for name in ARCHITECTURES)


def test_why_it_does_not_speculate() -> None:
    """Every reason has its row, in the order in which they are told."""
    section = (
        text(DOCS / "speculation.md").partition("## Why does it not speculate now?")[2].partition("\n## ")[0]
    )
    rows = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines() if line.startswith("| ")]
    assert rows[1:] == [why.value for why in DecisionReason]


def test_every_sampling_parameter_is_listed() -> None:
    section = text(DOCS / "api.md").partition("## Parameters")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section))
    assert {each.name for each in PARAMETERS} <= named


def test_the_readme_is_short() -> None:
    lines = text(ROOT / "README.md").splitlines()
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= LONGEST_LINE


def test_the_first_screen_tells_what_has_not_run() -> None:
    assert "GPUs are unproven" in "\n".join(text(ROOT / "README.md").splitlines()[:20])


def test_the_readme_names_every_package() -> None:
    packages = {path.parent.name for path in (ROOT / "src" / "ssd_serve").glob("*/__init__.py")}
    assert packages <= set(re.findall(r"`(\w+)`", text(ROOT / "README.md")))


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_path)
def test_links_lead_to_what_exists(document: Path) -> None:
    broken: list[str] = []
    for link in LINK.findall(text(document)):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        file = document.parent / path if path else document
        if not file.exists() or (anchor and anchor not in anchors(file.resolve())):
            broken.append(link)
    assert broken == []


def test_links_are_found() -> None:
    assert len(LINK.findall(text(ROOT / "README.md"))) > 10


def test_every_page_is_listed() -> None:
    listed = set(LINK.findall(text(DOCS / "README.md")))
    assert {page.name for page in PAGES} - listed == {"README.md"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_path)
def test_every_setting_exists(document: Path) -> None:
    named = set(re.findall(rf"\b{PREFIX}[A-Z_]+\b", text(document)))
    assert named <= {PREFIX + name.upper() for name in Settings.model_fields}
