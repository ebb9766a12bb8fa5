"""Speculative sampling by rejection: exact, whatever was drawn."""

import numpy as np
import pytest

from lab.ablate.rejection import DrawingSource, Drawn, reject
from ssd_serve.cache.node import Node
from ssd_serve.cache.slots import SlotPool
from ssd_serve.drafter.sources.contract import NodeRequest
from ssd_serve.messages import SamplingParameters
from ssd_serve.sampling.noise_rows import NoiseRows
from tests.fakes import VOCABULARY, FakeModel

pytestmark = pytest.mark.slow

P = np.array([0.5, 0.2, 0.15, 0.1, 0.05])
DRAFTS = {
    "equal": P,
    "flat": np.full(5, 0.2),
    "wrong": np.array([0.05, 0.05, 0.1, 0.2, 0.6]),
    "narrow": np.array([0.0, 0.9, 0.1, 0.0, 0.0]),
}
TRIALS = 5_000


def draw(q: np.ndarray, count: int, random: np.random.Generator) -> list[int]:
    return [int(token) for token in random.choice(len(q), min(count, int((q > 0).sum())), False, q)]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("count", [1, 3])
def test_the_tokens_follow_the_target_whatever_the_draft(draft: str, count: int) -> None:
    random, q = np.random.default_rng(5), DRAFTS[draft]
    found = [reject(P, q, draw(q, count, random), random)[0] for _ in range(TRIALS)]
    shares = np.bincount(found, minlength=5) / TRIALS
    assert np.abs(shares - P).max() < 4 * 0.5 / np.sqrt(TRIALS)


def test_one_draw_is_accepted_as_often_as_the_distributions_overlap() -> None:
    random, q = np.random.default_rng(6), DRAFTS["flat"]
    accepted = [reject(P, q, draw(q, 1, random), random)[1] is not None for _ in range(TRIALS)]
    assert np.mean(accepted) == pytest.approx(np.minimum(P, q).sum(), abs=0.03)


def test_equal_distributions_never_reject() -> None:
    random = np.random.default_rng(7)
    assert all(reject(P, P, draw(P, 1, random), random)[1] == 0 for _ in range(200))


def test_reach_learns_from_what_was_accepted() -> None:
    drawn = Drawn()
    before = drawn.log_reach([0.9, 0.5])
    for _ in range(50):
        drawn.observe(0, 0.9, accepted=False)
    after = drawn.log_reach([0.9, 0.5])
    assert after[0] < before[0]
    assert after[1] > before[1]  # more is left for the next one
    assert all(value < 0 for value in after)


ROOT = Node(99, -1, None, 0.0)


def source(draws: int, drawn: Drawn) -> DrawingSource:
    model = FakeModel(64, blur=0.5)
    return DrawingSource(model, SlotPool(64), NoiseRows(VOCABULARY, 64), 8, draws, drawn)


def first_draws(draws: int, seeds: range) -> list[list[int]]:
    found: list[list[int]] = []
    for seed in seeds:
        each = source(draws, Drawn())
        each.open(1, (5, 6, 7), SamplingParameters(temperature=1.0), seed)
        (candidates,) = each.expand([NodeRequest(1, ROOT)], [1.0])
        assert candidates is not None
        found.append([int(token) for token in candidates.tokens])
    return found


def test_children_are_draws_from_the_distribution_that_is_told() -> None:
    drawn = Drawn()
    one = source(1, drawn)
    one.open(1, (5, 6, 7), SamplingParameters(temperature=1.0), 3)
    one.expand([NodeRequest(1, ROOT)], [1.0])
    q = drawn.distributions[99]
    assert q.sum() == pytest.approx(1.0)
    trials = 600
    firsts = [tokens[0] for tokens in first_draws(1, range(trials))]
    shares = np.bincount(firsts, minlength=VOCABULARY) / trials
    assert np.abs(shares - q).max() < 4 * 0.5 / np.sqrt(trials)


def test_after_the_draws_come_the_most_probable_ones() -> None:
    drawn = Drawn()
    one = source(1, drawn)
    one.open(1, (5, 6, 7), SamplingParameters(temperature=1.0), 3)
    (candidates,) = one.expand([NodeRequest(1, ROOT)], [1.0])
    assert candidates is not None
    tokens = [int(token) for token in candidates.tokens]
    likely = [int(token) for token in np.argsort(-drawn.distributions[99], kind="stable")]
    assert tokens[1:] == [token for token in likely if token != tokens[0]][:7]
    assert len(set(tokens)) == 8


def test_what_is_told_of_nodes_ends_with_them() -> None:
    drawn = Drawn()
    one = source(2, drawn)
    one.open(1, (5, 6, 7), SamplingParameters(temperature=1.0), 3)
    one.expand([NodeRequest(1, ROOT), NodeRequest(1, Node(100, 8, ROOT, 0.0))], [1.0, 1.0])
    assert set(drawn.distributions) == {99, 100}
    one.commit(1, [8], [100], [100])
    assert set(drawn.distributions) == {100}
