"""Tests of acceptance figures by depth and draft source, and of the monitor of acceptance."""

import random
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from ssd_serve.base.messages import (
    AcceptanceHealth,
    Figures,
    SourceFigures,
    by_position,
    sum_histograms,
)
from ssd_serve.cache.expansions import ROOT_STEP, Expansion, pack
from ssd_serve.cache.replica import Replica
from ssd_serve.drafter.inline import InlineChannel
from ssd_serve.verifier.acceptance import Acceptance, AcceptanceMonitor, DraftedLevels, drafted_levels
from ssd_serve.verifier.control.wait import FixedSteps
from tests.cache.tree_access import candidates
from tests.fakes import HELLO, Case, make_core, make_engine, mixed_requests, run

ROOT = 77
NAMES = ("others", "model", "ngram")
MODEL, NGRAM = 2, 4


def grown(*proposals: tuple[int, Sequence[Expansion]]) -> Replica:
    """Return a replica with the expansions of each source applied."""
    replica = Replica(1, 1, ROOT, limit=100, vocabulary=50)
    for source, expansions in proposals:
        replica.apply(pack(1, 1, 0, expansions, "d", snapshot=True), source, source)
    return replica


def root(*tokens: int) -> Expansion:
    return Expansion(ROOT, ROOT_STEP, list(tokens), [-1.0 - token for token in range(len(tokens))])


def below(token: int, *tokens: int) -> Expansion:
    return Expansion(ROOT, token, list(tokens), [-1.0] * len(tokens))


def test_acceptance_of_several_rounds() -> None:
    rounds = Acceptance()
    both = grown((MODEL, [root(1, 9), below(1, 3)]), (NGRAM, [root(7, 1)]))
    candidates(both.tree)
    rounds.count(both, [1, 9, 7, 3], [-1, -1, -1, 0], [1, 1, 1, 2], accepted=(0, 3))
    rounds.count(grown((MODEL, [root(5)])), [5], [-1], [1], accepted=())
    rounds.count(grown(), [], [], [], accepted=())
    figures = rounds.add_to(Figures(rounds=3), NAMES)
    assert figures.rounds == 3
    assert figures.verified_depths == [1, 1, 1]
    assert figures.accepted_depths == [2, 0, 1]
    assert figures.sources == {"model": SourceFigures(4, 2), "ngram": SourceFigures(2, 1)}


def test_source_that_proposes_during_verification_counts() -> None:
    replica = grown((MODEL, [root(1, 2)]))
    replica.apply(pack(1, 1, 0, [root(2)], "d", snapshot=False), NGRAM, NGRAM)
    rounds = Acceptance()
    rounds.count(replica, [1, 2], [-1, -1], [1, 1], accepted=(1,))
    assert rounds.add_to(Figures(), NAMES).sources == {
        "model": SourceFigures(2, 1),
        "ngram": SourceFigures(1, 1),
    }


def check(figures: Figures) -> None:
    assert sum(figures.verified_depths) == sum(figures.accepted_depths) == figures.rounds
    assert sum(by_position(figures.accepted_depths)) == figures.accepted
    assert sum(by_position(figures.verified_depths)) <= figures.drafted
    verified, accepted = by_position(figures.verified_depths), by_position(figures.accepted_depths)
    assert all(tried >= found for tried, found in zip(verified, accepted, strict=False))
    assert len(accepted) <= len(verified)
    for each in figures.sources.values():
        assert each.accepted <= each.verified <= figures.drafted
    assert sum(each.verified for each in figures.sources.values()) >= figures.drafted
    assert sum(each.accepted for each in figures.sources.values()) >= figures.accepted


@pytest.mark.parametrize("blurs", [{}, {"one": 0.6}, {"one": 0.6, "two": 0.3}])
def test_acceptance_figures_of_an_engine_add_up(blurs: dict[str, float]) -> None:
    engine, _ = make_engine(Case(slots=4096, policy=lambda: FixedSteps(2)))
    for name, blur in blurs.items():
        hello = replace(HELLO, name=name, source=name)
        engine.drafters.connect(
            InlineChannel(make_core(Case(slots=4096, blur=blur)), hello), synchronous=True
        )
    outputs = run(engine, mixed_requests(6), lambda _: check(engine.figures))
    outputs_figures = [output.figures for output in outputs.values()]
    for figures in outputs_figures:
        check(figures)
    last = engine.figures
    assert set(last.sources) == set(blurs)
    assert last.verified_depths == sum_histograms([figures.verified_depths for figures in outputs_figures])
    assert last.accepted_depths == sum_histograms([figures.accepted_depths for figures in outputs_figures])
    for name in blurs:
        assert last.sources[name].verified == sum(one.sources[name].verified for one in outputs_figures)
        assert last.sources[name].accepted == sum(one.sources[name].accepted for one in outputs_figures) > 0
    if len(blurs) == 1:
        assert last.sources["one"] == SourceFigures(last.drafted, last.accepted)
    if len(blurs) == 2:
        both = sum(each.accepted for each in last.sources.values())
        assert last.accepted < both < 2 * last.accepted


def observe(monitor: AcceptanceMonitor, rounds: int, rate: float, seed: int = 0) -> list[AcceptanceHealth]:
    """Observe rounds with this acceptance rate, and return the changes of health."""
    chance, changes = random.Random(seed), [monitor.health]
    for _ in range(rounds):
        monitor.observe(chance.random() < rate, hit=chance.random() < rate)
        monitor.judge(drafting=True)
        if monitor.health is not changes[-1]:
            changes.append(monitor.health)
    return changes[1:]


@pytest.mark.parametrize(("rate", "seed"), [(0.2, 0), (0.5, 1), (0.8, 2)])
def test_random_acceptance_is_no_collapse(rate: float, seed: int) -> None:
    assert observe(AcceptanceMonitor(), 10_000, rate, seed) == []


def test_acceptance_collapse_lasts_until_recovery() -> None:
    monitor = AcceptanceMonitor()
    observe(monitor, 3000, 0.65)
    assert observe(monitor, 400, 0.1) == [AcceptanceHealth.COLLAPSED]
    assert observe(monitor, 8000, 0.1) == []
    assert observe(monitor, 2000, 0.65) == [AcceptanceHealth.GOOD]


def test_lower_acceptance_or_rounds_without_nodes_are_no_collapse() -> None:
    monitor = AcceptanceMonitor()
    observe(monitor, 3000, 0.65)
    assert observe(monitor, 3000, 0.4) == []
    for _ in range(3000):
        monitor.observe(None, hit=True)
        monitor.judge(drafting=True)
    assert monitor.health is AcceptanceHealth.GOOD


def without_hits(
    monitor: AcceptanceMonitor, rounds: int, right: bool | None = None, requests: int = 1
) -> str:
    for _ in range(rounds):
        for _ in range(requests):
            monitor.observe(right, hit=False)
        monitor.judge(drafting=True)
    return monitor.health.value


def test_drafts_without_hits_are_reported_until_one_hits() -> None:
    monitor = AcceptanceMonitor()
    assert without_hits(monitor, 30, requests=64) == "good"
    assert without_hits(monitor, 300) == "never hits"
    monitor.observe(None, hit=True)
    monitor.judge(drafting=True)
    assert monitor.health is AcceptanceHealth.GOOD
    assert without_hits(monitor, 300) == "never hits"
    monitor.judge(drafting=False)
    assert monitor.health is AcceptanceHealth.GOOD
    assert without_hits(AcceptanceMonitor(), 1000, right=True) == "good"


PARENTS = (-1, -1, 0, 2)


@pytest.mark.parametrize(
    ("sources", "accepted", "found"),
    [
        ((MODEL,) * 4, (), (0, 1)),  # both nodes of the first level were rejected
        ((MODEL,) * 4, (0,), (1, 2)),
        ((MODEL,) * 4, (1,), (1, 1)),  # nothing was verified below
        ((MODEL,) * 4, (0, 2), (2, 3)),
        ((NGRAM,) * 4, (0, 2), (0, 0)),
        ((MODEL | NGRAM, MODEL, NGRAM, MODEL), (0, 2), (1, 2)),
    ],
)
def test_levels_of_draft_models(
    sources: tuple[int, ...], accepted: tuple[int, ...], found: tuple[int, int]
) -> None:
    assert drafted_levels(sources, PARENTS, accepted, lookups=NGRAM) == found


def test_share_of_accepted_levels_follows_the_text() -> None:
    everything = DraftedLevels()
    for _ in range(2000):
        everything.observe(1, 5, 2)
    assert everything.share == pytest.approx(0.2, abs=0.02)
    text = everything.next_text()
    assert text.share == pytest.approx(everything.share)
    for _ in range(50):
        text.observe(4, 4, 5)
    assert text.share > 0.7 < text.hopeful
    for _ in range(2000):
        text.observe(0, 0, 2)
    assert text.share == pytest.approx(everything.share, abs=0.02), "it is forgotten while nothing is drafted"
