"""`ssd bench lossless`: the product, its figures and its verdict."""

import pytest

from ssd_serve.bench.lossless.proof import BATCHES, BUDGETS, DRAFTERS, ProofPlan, add, cases, run_lossless

SMALL = ProofPlan(("random-llama",), batches=(4,), budgets=(0, 4), sets=2, max_tokens=10)


def test_the_product_is_full() -> None:
    full = set(cases(ProofPlan()))
    assert len(full) == len(BATCHES) * (1 + len(BUDGETS) * (1 + len(DRAFTERS)))
    assert {case.mode for case in full} == {"ar", "sd", "ssd"}


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
