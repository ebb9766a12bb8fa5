"""A draft whose tokenizer has fewer tokens, and what is told of it."""

from pathlib import Path

import pytest

from lab.page_blocks import vocabulary
from lab.vocabulary.experiment import run_vocabulary, with_fewer_tokens
from ssd_serve.models.hub import embedded_folder
from ssd_serve.models.text.tokenizer import Tokenizer


def test_a_tokenizer_loses_its_rarest_tokens_and_still_reads_every_text(tmp_path: Path) -> None:
    draft = embedded_folder("draft")
    assert with_fewer_tokens(draft, tmp_path / "all", 1.0) == 1.0
    assert with_fewer_tokens(draft, tmp_path / "most", 0.8) == pytest.approx(0.8, abs=0.03)
    text = "registry = These\nregistry # naïve\n"
    own, other = Tokenizer(draft), Tokenizer(tmp_path / "most")
    mine, theirs = (each.encode(text, add_special_tokens=False) for each in (own, other))
    assert own.decode(theirs) == text
    assert len(theirs) > len(mine)


def test_fewer_tokens_are_worth_less_and_the_page_tells_it() -> None:
    result = run_vocabulary((1.0, 0.6), (0.0,), count=4)
    rows = result["results"]
    assert isinstance(rows, list)
    whole, part = rows
    assert whole["tokens_per_round"] > part["tokens_per_round"] >= 1
    assert f"| 100% | {whole['tokens_per_round']:.2f} |" in vocabulary(result)
