"""`python -m lab.ablate`: ways that differ in what they guess, not in what they say."""

import itertools
from dataclasses import replace
from typing import Any, cast

import pytest

from lab.ablate import experiment
from lab.ablate.experiment import (
    BEST_FIRST,
    CHAIN,
    GEOMETRIC_TABLE,
    REJECTION,
    SHARED,
    SYNCHRONOUS,
    UNIFORM_TABLE,
    UNIFORM_TREE,
    AblationPlan,
    AblationRun,
    GrowthWay,
    run_ablation,
)
from lab.ablate.report import ablation_table
from ssd_serve.errors import SsdError, UserError
from tests.lab.virtual_fakes import DRAFT_S, TARGET_S, fake_pair, fake_prompts

pytestmark = pytest.mark.slow

PLAN = AblationPlan(
    temperatures=(0.0, 1.0),
    prompts=2,
    tuning_prompts=2,
    tokens=24,
    width=8,
    candidates=4,
    depth=6,
)
SHAPES: dict[str, dict[str, int]] = {
    BEST_FIRST: {},
    SYNCHRONOUS: {},
    CHAIN: {"levels": 3},
    UNIFORM_TREE: {"fan_out": 2, "levels": 3},
    UNIFORM_TABLE: {"length": 3, "fallback": 2},
    GEOMETRIC_TABLE: {"length": 3, "fallback": 2},
}


def way(growth: str, choice: str = SHARED) -> GrowthWay:
    return GrowthWay(growth, choice, **SHAPES[growth])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_under_shared_noise_the_text_does_not_depend_on_growth(temperature: float) -> None:
    pair, (prompt,) = fake_pair(), fake_prompts(1)
    runs = {growth: AblationRun(pair, PLAN, way(growth), temperature) for growth in SHAPES}
    texts = {growth: run.text(prompt).decoded.tokens for growth, run in runs.items()}
    assert len(set(texts.values())) == 1
    assert len(texts[BEST_FIRST]) == PLAN.tokens


@pytest.mark.parametrize("growth", [SYNCHRONOUS, CHAIN])
def test_who_drafts_in_turns_pays_for_each_step(growth: str) -> None:
    text = AblationRun(fake_pair(), PLAN, way(growth), 1.0).text(fake_prompts(1)[0])
    spent = text.decoded.seconds - text.decoded.figures.rounds * TARGET_S
    before_the_first_report = 6
    assert text.draft_steps > 2 * before_the_first_report
    assert spent >= (text.draft_steps - before_the_first_report) * DRAFT_S


def test_nothing_but_waits_is_added_to_the_forwards() -> None:
    pair, prompts = fake_pair(), fake_prompts(1)
    for growth in SHAPES:
        text = AblationRun(pair, PLAN, way(growth), 1.0).text(prompts[0]).decoded
        forwards = text.figures.rounds * TARGET_S
        assert forwards <= text.seconds * 1.0001
        if growth == UNIFORM_TREE:  # every round waits for all its levels
            assert text.seconds >= forwards + text.figures.rounds * 2 * DRAFT_S


@pytest.mark.parametrize("choice", [SHARED, REJECTION])
@pytest.mark.parametrize("growth", list(SHAPES))
def test_every_way_drafts_and_repeats_itself(growth: str, choice: str) -> None:
    runs = [AblationRun(fake_pair(), PLAN, way(growth, choice), 1.0) for _ in range(2)]
    first, second = ([run.text(prompt) for prompt in fake_prompts(2)] for run in runs)
    assert first == second
    rounds = sum(text.decoded.figures.rounds for text in first)
    assert sum(text.decoded.decoded for text in first) > 1.2 * rounds
    rows = 1 if growth == CHAIN else PLAN.width
    assert all(text.draft_rows <= (rows + 4) * text.draft_steps for text in first)  # and what is fed again
    ready = [depth > 0 for text in first for depth in text.ready]
    if growth in (UNIFORM_TREE, CHAIN):
        assert not any(ready)
    elif growth != SYNCHRONOUS:
        assert 0 < sum(ready) < len(ready)


def test_a_table_verifies_one_chain() -> None:
    text = AblationRun(fake_pair(), PLAN, way(GEOMETRIC_TABLE), 1.0).text(fake_prompts(1)[0]).decoded
    assert 0 < text.figures.drafted <= 3 * text.figures.rounds


@pytest.fixture
def one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way in one shape: tuning is tested where it lives."""
    monkeypatch.setattr(experiment, "shapes", lambda growth, choice: [way(growth, choice)])
    monkeypatch.setattr(GrowthWay, "neighbours", lambda _way: iter(()))


@pytest.mark.usefixtures("one_shape")
def test_a_run_compares_all_ways_and_says_that_time_is_virtual() -> None:
    said: list[str] = []
    result = run_ablation(fake_pair(), fake_prompts(40), PLAN, said.append)
    rows = cast(list[dict[str, Any]], result["results"])
    ways = [(row["temperature"], row["growth"], row["choice"]) for row in rows]
    assert ways == [(0.0, growth, SHARED) for growth in SHAPES] + [
        (1.0, growth, choice) for choice in (SHARED, REJECTION) for growth in SHAPES
    ]
    assert all(
        (row["live"] is None) == (row["growth"] == BEST_FIRST and row["choice"] == SHARED) for row in rows
    )
    table = ablation_table(result)
    assert "virtual" in table
    assert table.count("rejection sampling |") == 6
    assert result["plain_tokens_per_s"] == 50.0
    assert said


@pytest.mark.usefixtures("one_shape")
def test_texts_of_rejection_sampling_that_nearly_loop_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = itertools.cycle((1.0, 0.0))
    monkeypatch.setattr(experiment, "repeated_share", lambda _tokens: next(shares))
    plan = replace(PLAN, temperatures=(1.0,))
    result = run_ablation(fake_pair(), fake_prompts(40), plan, lambda _line: None)
    rows = cast(list[dict[str, Any]], result["results"])
    assert [row["prompts"] for row in rows] == [2] * 6 + [1] * 6
    assert all(2 * row["tokens"] == rows[0]["tokens"] for row in rows[6:])
    monkeypatch.setattr(experiment, "repeated_share", lambda _tokens: 1.0)
    with pytest.raises(SsdError, match="every text nearly loops; ask for more prompts"):
        run_ablation(fake_pair(), fake_prompts(40), plan, lambda _line: None)


def test_other_results_are_refused() -> None:
    with pytest.raises(UserError, match="not a result"):
        ablation_table({"results": [{"mode": "ar"}], "time": "real", "plain_tokens_per_s": 1.0})


@pytest.mark.parametrize("growth", list(SHAPES))
def test_every_shape_that_is_tuned_has_neighbours_and_the_live_tree_has_none(growth: str) -> None:
    for each in experiment.shapes(growth, SHARED):
        around = list(each.neighbours())
        assert each not in around
        assert bool(around) == (each.shape not in ("", "adaptive steps"))
