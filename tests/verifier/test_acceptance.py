"""Tests of acceptance figures by depth and by draft source."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from ssd_serve.base.depths import added, by_position
from ssd_serve.base.messages import Figures, SourceFigures
from ssd_serve.cache.expansions import ROOT_STEP, Expansion, pack
from ssd_serve.cache.replica import Replica
from ssd_serve.drafter.inline import InlineChannel
from ssd_serve.verifier.acceptance import Acceptance
from ssd_serve.verifier.control.budget import FixedSteps
from tests.cache.tree_access import candidates
from tests.fakes import HELLO, Case, make_core, make_engine, mixed_requests, run

ROOT = 77
NAMES = ("others", "model", "ngram")
MODEL, NGRAM = 2, 4


def grown(*guesses: tuple[int, Sequence[Expansion]]) -> Replica:
    """Return a replica with the expansions of each source applied."""
    replica = Replica(1, 1, ROOT, limit=100, vocabulary=50)
    for source, expansions in guesses:
        replica.apply(pack(1, 1, 0, expansions, "d", snapshot=True), source, source)
    return replica


def root(*tokens: int) -> Expansion:
    return Expansion(ROOT, ROOT_STEP, list(tokens), [-1.0 - token for token in range(len(tokens))])


def below(token: int, *tokens: int) -> Expansion:
    return Expansion(ROOT, token, list(tokens), [-1.0] * len(tokens))


def test_a_sequence_of_rounds() -> None:
    rounds = Acceptance()
    both = grown((MODEL, [root(1, 9), below(1, 3)]), (NGRAM, [root(7, 1)]))
    candidates(both.tree)
    rounds.count(both, [1, 9, 7, 3], [-1, -1, -1, 0], [1, 1, 1, 2], accepted=(0, 3))
    rounds.count(grown((MODEL, [root(5)])), [5], [-1], [1], accepted=())
    rounds.count(grown(), [], [], [], accepted=())
    told = rounds.add_to(Figures(rounds=3), NAMES)
    assert told.rounds == 3
    assert told.verified_depths == [1, 1, 1]
    assert told.accepted_depths == [2, 0, 1]
    assert told.sources == {"model": SourceFigures(4, 2), "ngram": SourceFigures(2, 1)}


def test_what_is_named_while_it_is_verified_was_proposed_too() -> None:
    replica = grown((MODEL, [root(1, 2)]))
    replica.apply(pack(1, 1, 0, [root(2)], "d", snapshot=False), NGRAM, NGRAM)
    rounds = Acceptance()
    rounds.count(replica, [1, 2], [-1, -1], [1, 1], accepted=(1,))
    assert rounds.add_to(Figures(), NAMES).sources == {
        "model": SourceFigures(2, 1),
        "ngram": SourceFigures(1, 1),
    }


def test_acceptance_of_sources_with_one_name_is_summed() -> None:
    rounds = Acceptance()
    rounds.count(grown((MODEL, [root(1)]), (NGRAM, [root(2)])), [1, 2], [-1, -1], [1, 1], accepted=(0,))
    assert rounds.add_to(Figures(), ("others", "same", "same")).sources == {"same": SourceFigures(2, 1)}


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


@pytest.mark.parametrize("blurs", [{}, {"one": 0.0}, {"one": 0.6}, {"one": 0.6, "two": 0.3}])
def test_an_engines_rounds_add_up(blurs: dict[str, float]) -> None:
    engine, _ = make_engine(Case(slots=4096, policy=lambda: FixedSteps(2)))
    for name, blur in blurs.items():
        hello = replace(HELLO, name=name, source=name)
        engine.drafters.connect(
            InlineChannel(make_core(Case(slots=4096, blur=blur)), hello), synchronous=True
        )
    outputs = run(engine, mixed_requests(6), lambda _: check(engine.figures))
    told = [output.figures for output in outputs.values()]
    for figures in told:
        check(figures)
    last = engine.figures
    assert set(last.sources) == set(blurs)
    assert last.verified_depths == added([figures.verified_depths for figures in told])
    assert last.accepted_depths == added([figures.accepted_depths for figures in told])
    for name in blurs:
        assert last.sources[name].verified == sum(one.sources[name].verified for one in told)
        assert last.sources[name].accepted == sum(one.sources[name].accepted for one in told) > 0
    if len(blurs) == 1:
        assert last.sources["one"] == SourceFigures(last.drafted, last.accepted)
    if len(blurs) == 2:
        both = sum(each.accepted for each in last.sources.values())
        assert last.accepted < both < 2 * last.accepted
