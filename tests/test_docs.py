"""Documents agree with the code, and their links lead to files that exist."""

import re
from functools import cache
from pathlib import Path

import pytest

from ssd_serve.base.messages import DecisionReason
from ssd_serve.base.settings import PREFIX, REMOVED_SETTINGS, RENAMED_SETTINGS, Settings
from ssd_serve.models.architectures.registry import ARCHITECTURES
from ssd_serve.sampling.parameters import PARAMETERS
from ssd_serve.server.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from tests.generated_docs import DOCS, TABLES, block

ROOT = DOCS.parent
PAGES = sorted(DOCS.glob("*.md"))
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    ROOT / "deploy" / "README.md",
    *PAGES,
]
MAX_LINES, LONGEST_LINE = 130, 400
LINK = re.compile(r"\]\(([^()\s]+)\)")


def text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def by_path(file: Path) -> str:
    return str(file.relative_to(ROOT))


@cache
def anchors(file: Path) -> frozenset[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    outside_code = re.sub(r"^```.*?^```", "", text(file), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", outside_code, re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


@pytest.mark.parametrize("name", TABLES)
def test_generated_tables(name: str) -> None:
    """Generated tables are current; `.venv/bin/python -m tests.generated_docs` writes them."""
    assert block(text(DOCS / f"{name}.md"), name) == TABLES[name]()


def test_every_field_of_chats_and_completions_has_a_meaning() -> None:
    for body in (GenerationRequest, CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest):
        for name, field in body.model_json_schema()["properties"].items():
            assert field.get("description") or None in field["enum"], name


def test_every_architecture_is_documented() -> None:
    models = text(DOCS / "models.md")
    assert all(f"| `{name}` |" in models for name in ARCHITECTURES)


def test_every_decision_reason_is_documented() -> None:
    section = (
        text(DOCS / "speculation.md").partition("## Why does it not speculate now?")[2].partition("\n## ")[0]
    )
    rows = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines() if line.startswith("| ")]
    assert rows[1:] == [why.value for why in DecisionReason]


def test_every_sampling_parameter_is_listed() -> None:
    named = set(re.findall(r"`(\w+)`", text(DOCS / "fields.md")))
    assert {each.name for each in PARAMETERS} <= named


def test_the_readme_is_short() -> None:
    lines = text(ROOT / "README.md").splitlines()
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= LONGEST_LINE


def test_the_first_screen_names_what_has_not_run() -> None:
    assert "GPUs are unproven" in "\n".join(text(ROOT / "README.md").splitlines()[:20])


def test_the_architecture_page_names_every_package() -> None:
    packages = {path.parent.name for path in (ROOT / "src" / "ssd_serve").glob("*/__init__.py")}
    assert packages <= set(re.findall(r"`(\w+)`", text(DOCS / "architecture.md")))


def test_files_that_the_architecture_page_names_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", text(DOCS / "architecture.md")))
    assert len(named) > 15
    assert [
        name for name in named if not ((ROOT / "src" / "ssd_serve" / name).exists() or (ROOT / name).exists())
    ] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_path)
def test_links_lead_to_existing_files(document: Path) -> None:
    broken: list[str] = []
    for link in LINK.findall(text(document)):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        file = document.parent / path if path else document
        if not file.exists() or (anchor and anchor not in anchors(file.resolve())):
            broken.append(link)
    assert broken == []


def test_every_page_is_listed() -> None:
    listed = set(LINK.findall(text(DOCS / "README.md")))
    assert {page.name for page in PAGES} - listed == {"README.md"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_path)
def test_every_setting_exists(document: Path) -> None:
    named = set(re.findall(rf"\b{PREFIX}[A-Z_]+\b", text(document)))
    removed = {*REMOVED_SETTINGS, *RENAMED_SETTINGS} if document.name == "CHANGELOG.md" else ()
    assert named <= {PREFIX + name.upper() for name in (*Settings.model_fields, *removed)}
