"""`ssd bench lossless`: the cases, the distinct positions, the judge of bf16, and the verdict."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssd_serve.app.cli.main import main
from ssd_serve.base.engine_config import EMBEDDED
from ssd_serve.base.messages import Submit
from ssd_serve.bench.lossless import proof
from ssd_serve.bench.lossless.judge import Judge, first_difference
from ssd_serve.bench.lossless.proof import (
    BATCHES,
    BUDGETS,
    DRAFTERS,
    Proof,
    ProofPlan,
    cases,
    requests,
    run_lossless,
    upper_bound,
)
from ssd_serve.bench.lossless.random_pair import write_random_pair
from ssd_serve.bench.lossless.rig import Case, LoadedPair, LoadedTarget, Outputs, run_case
from tests.end_to_end.tiny_pair import write_pair

SMALL = ProofPlan(("random-llama",), batches=(4,), budgets=(0, 4), sets=2, max_tokens=10)


def test_cases_are_the_whole_product() -> None:
    full = set(cases(ProofPlan()))
    assert len(full) == len(BATCHES) * (1 + len(BUDGETS) * (1 + len(DRAFTERS)))
    assert {case.mode for case in full} == {"ar", "sd", "ssd"}


def test_lookup_sources_have_no_killed_drafter() -> None:
    kinds = {case.drafter for case in cases(ProofPlan(), "ngram")}
    assert kinds == {*DRAFTERS} - {"killed"}
    assert {case.drafter for case in cases(ProofPlan(), "self:1,ngram")} == {*DRAFTERS}


@pytest.mark.slow
def test_each_named_draft_is_lossless(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path, layers=2)
    drafts = f"{draft},ngram", "self:1"
    result = run_lossless(replace(SMALL, pairs=(str(target),), drafts=drafts, sets=1), print)
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
def test_impossible_drafts_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "lossless", "--quick", *flags]) != 0
    assert message in capsys.readouterr().err


TINY = ProofPlan(("random-llama",), batches=(4,), budgets=(4,), sets=1, max_tokens=8)


@pytest.mark.slow
def test_proof_counts_distinct_positions_and_runs_both_dtypes() -> None:
    lines: list[str] = []
    result: dict[str, Any] = run_lossless(TINY, lines.append)
    assert result["lossless"] is True
    for half in (result["totals"], result["bf16"]):
        assert half["cases"] == len(list(cases(TINY))) == 5
        assert 100 < half["positions"] <= 16 * 8  # the 16 requests of the only set
        assert half["tokens"] == 5 * half["positions"]
        assert half["accepted"] > 0
        assert half["divergences"] == half["near_ties"]
        assert half["near_ties_per_token_at_most"] == pytest.approx(
            upper_bound(half["distinct_near_ties"], half["positions"])
        )
    assert len(result["results"]) == len(result["bf16"]["results"]) == 5
    assert sum(row["tokens"] for row in result["results"]) == result["totals"]["tokens"]
    assert [line.partition(":")[0] for line in lines] == ["random-llama ", "bf16"]


@pytest.mark.parametrize("broken", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_wrong_tokens_in_either_dtype_are_not_lossless(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large difference is an error in bf16 too, not rounding."""

    def wrong(pair: LoadedTarget, case: Case, submits: Sequence[Submit]) -> Outputs:
        found = run_case(pair, case, submits)
        dtype = "bf16" if pair.target.facts.dtype == "bf16" else "fp32"
        if case.mode != "ssd" or dtype != broken:
            return found
        changed = {number: (*tokens[:2], 7, *tokens[3:]) for number, tokens in found.tokens.items()}
        return replace(found, tokens=changed)

    monkeypatch.setattr(proof, "run_case", wrong)
    result: dict[str, Any] = run_lossless(TINY, lambda _line: None)
    assert result["lossless"] is False
    half = result["bf16"] if broken == "bf16" else result["totals"]
    other = result["totals"] if broken == "bf16" else result["bf16"]
    assert half["divergences"] > half["near_ties"]
    assert other["divergences"] == other["near_ties"]


def test_proof_in_bf16_fails_if_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Proof.run

    def skipped(self: Proof, pair: LoadedTarget, plan: ProofPlan, draft: str, dtype: Any = "fp32") -> None:
        if dtype == "fp32":
            run(self, pair, plan, draft, dtype)

    monkeypatch.setattr(Proof, "run", skipped)
    result: dict[str, Any] = run_lossless(TINY, lambda _line: None)
    assert result["lossless"] is False
    assert result["bf16"]["positions"] == 0
    assert result["bf16"]["near_ties_per_token_at_most"] is None


def test_judge_of_bf16_tells_rounding_from_errors(tmp_path: Path) -> None:
    folders = write_random_pair("random-llama", tmp_path)
    pair = LoadedPair("random-llama", *folders, "bf16")
    submits = [each for each in requests(pair.vocabulary, 4) if each.parameters.temperature == 0.0][:1]
    (submit,) = submits
    plain = run_case(pair, Case("ar", 1), submits)
    tokens = plain.tokens[submit.request]
    judge = Judge(pair, "bf16")
    gaps = {
        token: judge.differences(submits, plain, Outputs({submit.request: (token, *tokens[1:])}, 0, 0))[0]
        for token in range(pair.vocabulary)
        if token != tokens[0]
    }
    assert first_difference(tokens, tokens) is None
    limits = {each.limit for each in gaps.values()}
    assert len(limits) == 1
    assert all(each.near_tie == (each.gap < each.limit) for each in gaps.values())
    assert sum(each.near_tie for each in gaps.values()) < 5
    assert Judge(pair).differences(submits, plain, plain) == []


@pytest.mark.parametrize(
    ("events", "trials", "bound"), [(0, 3000, 3.0 / 3000), (1, 1000, 4.74 / 1000), (4, 3078, 9.15 / 3078)]
)
def test_upper_bound_is_that_of_the_poisson_distribution(events: int, trials: int, bound: float) -> None:
    assert upper_bound(events, trials) == pytest.approx(bound, rel=2e-3)
    assert upper_bound(events, 0) is None


def test_case_that_never_speculates_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def idle(pair: LoadedTarget, case: Case, submits: Sequence[Submit]) -> Outputs:
        return replace(run_case(pair, case, submits), accepted=0)

    monkeypatch.setattr(proof, "run_case", idle)
    result: dict[str, Any] = run_lossless(TINY, lambda _line: None)
    assert result["lossless"] is False
    assert result["totals"]["idle_cases"] == 3  # not the plain case, not the one with garbage
