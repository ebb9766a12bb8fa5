"""Rules for what stands below a right guess: the target's own text by all of them, and what each of them
guesses anew. A random head of a random target: under shared noise some of its guesses are right."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from lab import page_blocks
from lab.rereading.experiment import (
    BESIDE,
    INLINE,
    HeadedPair,
    RereadingPlan,
    RereadingRun,
    loaded_head,
    run_rereading,
    table,
)
from lab.rereading.rules import ALL_AGAIN, KEPT, ROOT_AGAIN, RULES
from lab.virtual.rig import SLOTS, TimedPair, decode
from ssd_serve.drafter.sources.contract import Candidates, NodeRequest
from ssd_serve.drafter.sources.eagle import EagleSource
from ssd_serve.messages import SamplingParameters
from ssd_serve.models.load import ModelWish, load_model
from ssd_serve.plan.virtual_time import Clock
from ssd_serve.verifier.planning.growth import Never
from tests.end_to_end.tiny_pair import write_head, write_model
from tests.lab.virtual_fakes import TABLE, fake_prompts

LAYERS = (1, 3, 4)
TOKENS = 24
(PROMPT,) = fake_prompts(1)


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> HeadedPair:
    folder = tmp_path_factory.mktemp("headed")
    write_model(folder / "target", seed=1, noise=0.0, layers=8)
    head = loaded_head(write_head(folder / "head", folder / "target", range(257)), folder / "target")
    wish = ModelWish(device="cpu", dtype="fp32", slots=SLOTS, context=None, features=LAYERS)
    target = load_model(folder / "target", wish)
    return HeadedPair(TimedPair(target, target, TABLE), head, LAYERS)


def plain(headed: HeadedPair, temperature: float) -> tuple[int, ...]:
    clock = Clock()
    engine, _ = headed.pair.engine(clock, Never(), 8)
    parameters = SamplingParameters(temperature=temperature, max_tokens=TOKENS, ignore_eos=True)
    return decode(engine, clock, 1, PROMPT, parameters).tokens


class Watched:
    """Nodes that were expanded, and which of them a second time: whether they were the root then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes: set[int] = set()
        self.again: list[bool] = []
        expand = EagleSource.expand

        def watched(
            source: EagleSource, picks: Sequence[NodeRequest], scales: Sequence[float]
        ) -> Sequence[Candidates | None]:
            found = expand(source, picks, scales)
            done = [pick for pick, each in zip(picks, found, strict=True) if each is not None]
            self.again += [not pick.path for pick in done if pick.node in self.nodes]
            self.nodes |= {pick.node for pick in done}
            return found

        monkeypatch.setattr(EagleSource, "expand", watched)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("layout", "temperature"),
    [
        (BESIDE, 1.0),
        pytest.param(BESIDE, 0.0, marks=pytest.mark.slow),
        pytest.param(INLINE, 1.0, marks=pytest.mark.slow),
    ],
)
def test_by_every_rule_it_is_the_target_s_own_text(
    headed: HeadedPair, layout: str, temperature: float, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    text = RereadingRun(headed, RULES[rule], layout).text(PROMPT, temperature, TOKENS)
    assert text.tokens == plain(headed, temperature)
    if layout == BESIDE and temperature:
        assert text.figures.accepted > TOKENS // 4
        assert bool(watched.again) == (rule != KEPT)
        assert all(watched.again) == (rule != ALL_AGAIN)


def test_rules_are_compared_on_the_same_texts(headed: HeadedPair) -> None:
    said: list[str] = []
    plan = RereadingPlan(INLINE, (1.0,), 2, 4)
    result = run_rereading(headed, fake_prompts(2), plan, said.append)
    rows = cast(list[dict[str, Any]], result["results"])
    assert [row["layout"] for row in rows] == [INLINE]
    for row in rows:
        assert row["texts"] + row["loops_left_out"] == 2
        assert list(row["tokens_per_s"]) == list(RULES)
        assert list(row["against_kept"]) == [ROOT_AGAIN, ALL_AGAIN]
    assert table(result).count(ROOT_AGAIN) == 1
    assert page_blocks.rereading(result, result).count("\n") == 3
    assert len(said) == 1
