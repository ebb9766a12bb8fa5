"""What documents show of results is what the committed files say."""

import re
from pathlib import Path

import pytest

from lab.pages import BLOCKS, Block
from ssd_serve.bench.provenance import ROOT
from ssd_serve.errors import UserError
from tests.generated_docs import block
from tests.test_docs import DOCUMENTS, LINK

COPIES = [
    ("README.md", "- **Speed is measured", "modes"),
    ("README.md", "- **For crowds", "load"),
]
"""Paragraphs that repeat factors of a block of results.md."""


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def linked_results() -> dict[str, set[str]]:
    """Result files by the page that links to them."""
    found: dict[str, set[str]] = {}
    for document in DOCUMENTS:
        targets = [
            (document.parent / link.partition("#")[0]).resolve() for link in LINK.findall(text(str(document)))
        ]
        files = {str(each.relative_to(ROOT)) for each in targets if each.suffix == ".json"}
        found[str(document.relative_to(ROOT))] = {each for each in files if "/results/" in each}
    return found


@pytest.mark.parametrize("each", BLOCKS, ids=lambda each: each.name)
def test_a_block_is_what_its_files_say(each: Block) -> None:
    """Where this fails, run `.venv/bin/python -m lab.pages`."""
    assert block(text(each.page), each.name) == each.made()


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "damaged.json").write_text('{"results": [', encoding="utf-8")
    with pytest.raises(UserError, match=r"damaged\.json is not a result"):
        Block("docs/results.md", "modes", ("damaged.json",), str).made(tmp_path)


def test_every_result_that_a_document_links_to_is_a_block_of_it() -> None:
    shown = {(each.page, file) for each in BLOCKS for file in each.files}
    linked = {(page, file) for page, files in linked_results().items() for file in files}
    assert linked == shown, "whoever reads a block finds its file"


def test_a_copied_factor_stands_in_the_block_and_there_is_none_without_a_block() -> None:
    measured = {each.name for each in BLOCKS}
    for page, begins, name in COPIES:
        paragraph = text(page).partition(begins)[2].partition("\n- ")[0]
        factors = re.findall(r"\d+\.\d+", paragraph)
        assert bool(factors) == (name in measured)
        whole = block(text("docs/results.md"), name)
        assert [factor for factor in factors if f"{factor}x" not in whole] == []


def test_a_block_has_one_place() -> None:
    places = [(each.page, each.name) for each in BLOCKS]
    assert len(set(places)) == len(places)
    for page, name in places:
        assert Path(page).suffix == ".md"
        assert text(page).count(f"<!-- {name}:begin -->") == 1
