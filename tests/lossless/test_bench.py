"""`ssd bench lossless`: the product, its figures and its verdict."""

from dataclasses import replace
from pathlib import Path

import pytest

from ssd_serve.app.cli.main import main
from ssd_serve.base.engine_settings import EMBEDDED
from ssd_serve.bench.lossless.proof import BATCHES, BUDGETS, DRAFTERS, ProofPlan, add, cases, run_lossless
from tests.end_to_end.tiny_pair import write_pair

SMALL = ProofPlan(("random-llama",), batches=(4,), budgets=(0, 4), sets=2, max_tokens=10)


def test_the_product_is_full() -> None:
    full = set(cases(ProofPlan()))
    assert len(full) == len(BATCHES) * (1 + len(BUDGETS) * (1 + len(DRAFTERS)))
    assert {case.mode for case in full} == {"ar", "sd", "ssd"}


def test_what_is_looked_up_in_this_process_has_no_drafter_that_could_be_killed() -> None:
    kinds = {case.drafter for case in cases(ProofPlan(), "ngram")}
    assert kinds == {*DRAFTERS} - {"killed"}
    assert {case.drafter for case in cases(ProofPlan(), "self:1,ngram")} == {*DRAFTERS}


@pytest.mark.slow
def test_drafts_that_are_named_are_lossless_each(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path, layers=2)
    drafts = f"{draft},ngram", "self:1"
    result = run_lossless(replace(SMALL, pairs=(str(target),), drafts=drafts), print)
    assert result["lossless"] is True
    rows = result["results"]
    assert isinstance(rows, list)
    for name in drafts:
        assert sum(row["accepted"] for row in rows if row["draft"] == name) > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--draft", "none"], "nothing drafts with --draft none"),
        (["--target", EMBEDDED], "--target needs --draft"),
    ],
)
def test_drafts_that_cannot_be_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "lossless", "--quick", *flags]) != 0
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_product_is_lossless_and_says_so() -> None:
    said: list[str] = []
    result = run_lossless(SMALL, said.append)
    assert result["lossless"] is True
    rows = result["results"]
    assert isinstance(rows, list)
    assert len(rows) == len(list(cases(SMALL)))
    totals = result["totals"]
    assert isinstance(totals, dict)
    assert totals["tokens"] == sum(row["tokens"] for row in rows) > 1000
    assert totals["accepted"] > 0
    assert totals["divergences"] == totals["near_ties"] == totals["distinct_near_ties"] == 0
    assert "bf16" in result
    assert len(said) == 2


def test_speculation_that_never_happens_proves_nothing() -> None:
    keys = ("cases", "tokens", "accepted", "divergences", "near_ties", "idle_cases")
    totals: dict[str, int] = dict.fromkeys(keys, 0)
    row: dict[str, object] = {"mode": "ssd", "budget": 4, "drafter": "sane", "accepted": 0, "tokens": 5}
    idle = {**row, "divergences": 0, "near_ties": 0}
    for case in (idle, {**idle, "drafter": "garbage"}, {**idle, "budget": 0}, {**idle, "accepted": 3}):
        add(totals, case)
    assert totals["idle_cases"] == 1
    assert totals["cases"] == 4
