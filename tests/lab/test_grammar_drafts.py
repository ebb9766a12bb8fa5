"""Drafts that keep to grammars beside others, and what is told of them."""

from lab.grammar_drafts.experiment import run_grammar_drafts
from lab.page_blocks import grammar_drafts


def test_drafts_that_keep_to_grammars_are_worth_more_and_the_page_tells_it() -> None:
    result = run_grammar_drafts(("sd",), (0.6,), schemas=3)
    rows = result["results"]
    assert isinstance(rows, list)
    (row,) = rows
    found = row["tokens_per_round"]
    assert found["kept"] > found["any"] >= 1
    assert row["times_as_fast"]["low"] <= row["times_as_fast"]["mean"] <= row["times_as_fast"]["high"]
    assert f"| sd | 0.6 | {found['any']:.2f} | {found['kept']:.2f} |" in grammar_drafts(result)
