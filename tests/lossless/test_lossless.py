"""Losslessness on real checkpoints in fp32: any mode, batch, budget and drafter gives the plain text.

A pairwise covering design of the product that `ssd bench lossless` runs in full. Each case runs 16 requests
of four temperatures, with penalties, stops, truncation, biases, minimum lengths, and two choices of each
prompt.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ssd_serve.base.engine_config import EMBEDDED
from ssd_serve.bench.lossless.judge import Judge
from ssd_serve.bench.lossless.proof import BATCHES, BUDGETS, requests
from ssd_serve.bench.lossless.random_pair import RANDOM_PAIRS, write_random_pair
from ssd_serve.bench.lossless.rig import Case, LoadedPair, Outputs, run_case
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.hub import resolve_model
from tests.lossless.covering import covering_pairs

MAX_TOKENS = 24
QUICK = "random-llama"
WAYS = (Case("sd", 1), Case("ssd", 1), Case("ssd", 1, 0, "garbage"), Case("ssd", 1, 0, "killed"))


def design() -> list[tuple[str, Case]]:
    """Pairs of models and cases: every two values of pair, way, batch and budget meet."""
    found: list[tuple[str, Case]] = []
    rows = covering_pairs(
        {"pair": (EMBEDDED, *RANDOM_PAIRS), "way": WAYS, "batch": BATCHES, "budget": BUDGETS}
    )
    for row in rows:
        way, batch, budget = row["way"], row["batch"], row["budget"]
        assert isinstance(way, Case)
        assert isinstance(batch, int)
        assert isinstance(budget, int)
        found.append((str(row["pair"]), replace(way, batch=batch, budget=budget)))
    return found


def slow_unless_quick(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """Quick runs use a single pair."""
    return () if name == QUICK else (pytest.mark.slow,)


CASES = [pytest.param(name, case, marks=slow_unless_quick(name)) for name, case in design()]


class Proof:
    """A pair, and its plain texts."""

    def __init__(self, pair: LoadedPair) -> None:
        self.pair = pair
        self.submits = requests(pair.vocabulary, MAX_TOKENS)
        self.plain = run_case(pair, Case("ar", 1), self.submits)
        self._judge = Judge(pair)

    def check(self, case: Case) -> Outputs:
        """Run the case; every text must be the plain one, or differ first at a near-tie."""
        found = run_case(self.pair, case, self.submits)
        differences = self._judge.differences(self.submits, self.plain, found)
        assert all(each.near_tie for each in differences), differences
        assert len(differences) <= 1, "near-ties are far rarer than this"
        return found


Prove = Callable[[str], Proof]


@pytest.fixture(scope="module")
def prove(tmp_path_factory: pytest.TempPathFactory, served_kernels: NativeLibrary | None) -> Prove:
    """Loads a pair once a module, with the kernels that a server here would use."""
    proofs: dict[str, Proof] = {}

    def get(name: str) -> Proof:
        if name not in proofs:
            if name == EMBEDDED:
                folders = resolve_model(name, "target"), resolve_model(name, "draft")
            else:
                folders = write_random_pair(name, tmp_path_factory.mktemp(name))
            proofs[name] = Proof(LoadedPair(name, *folders, native=served_kernels))
        return proofs[name]

    return get


def label(value: object) -> str:
    if isinstance(value, Case):
        return f"{value.mode}-{value.drafter}-batch{value.batch}-budget{value.budget}"
    return str(value)


@pytest.mark.parametrize(("name", "case"), CASES, ids=label)
def test_speculation_is_lossless(prove: Prove, name: str, case: Case) -> None:
    found = prove(name).check(case)
    if case.budget == 0:
        assert found.drafted == 0
    elif case.drafter == "garbage":
        assert found.drafted > 0
    else:
        assert found.accepted > 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=slow_unless_quick(name)) for name in (EMBEDDED, *RANDOM_PAIRS)]
)
@pytest.mark.parametrize("batch", [4, 16])
def test_batches_equal_single_requests(prove: Prove, name: str, batch: int) -> None:
    assert prove(name).check(Case("ar", batch)).drafted == 0


def test_lossless_requests_cover_ends_and_parameters(prove: Prove) -> None:
    proof = prove("random-llama")
    parameters = [submit.parameters for submit in proof.submits]
    kinds = {
        (each.temperature, each.repetition_penalty != 1.0, bool(each.stop_token_ids), each.top_k > 0)
        for each in parameters
    }
    assert len(kinds) >= 8
    assert {each.temperature for each in parameters} == {0.0, 0.7, 1.0, 1.5}
    texts = proof.plain.tokens
    assert any(len(texts[submit.request]) < submit.parameters.max_tokens for submit in proof.submits)
    assert any(texts[number] != texts[number + 1] for number in range(0, 16, 2)), (
        "choices of one prompt have seeds of their own"
    )


@pytest.mark.slow
def test_draft_equal_to_the_target_is_mostly_accepted(tmp_path: Path) -> None:
    target, _ = write_random_pair("random-llama", tmp_path)
    proof = Proof(LoadedPair("itself", target, target))
    found = proof.check(Case("ssd", 1, 8))
    tokens = sum(map(len, proof.plain.tokens.values()))
    assert found.accepted > 0.55 * tokens  # three steps a round: at most 0.75
