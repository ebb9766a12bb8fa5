"""The ways of growing that best-first trees are compared with."""

import pytest

from lab.ablate.growth import FanOut, TableCore, TableShape, UniformCore
from ssd_serve.cache.replica import Replica
from ssd_serve.draft_messages import Growth, Open, Outcome
from ssd_serve.messages import SamplingParameters
from ssd_serve.seeds import mix, root_name
from tests.fakes import VOCABULARY, ScriptedSource

pytestmark = pytest.mark.slow

ROOT = root_name(1, 1, 2)
OPEN = Open(1, 1, (5, 6, 7), (), SamplingParameters(max_tokens=100), 9, ROOT)
FIRST, SECOND, THIRD = 11, 12, 13


def scripted() -> ScriptedSource:
    source = ScriptedSource()
    source.candidates = [FIRST, SECOND, THIRD]
    return source


def outcome(*tokens: int) -> Outcome:
    root = ROOT
    for token in tokens:
        root = mix(root, token)
    return Outcome(1, 1, 3, tokens, root)


def replica_of(growths: list[Growth]) -> Replica:
    replica = Replica(1, 1, ROOT, 4096, VOCABULARY)
    for growth in growths:
        assert replica.apply(growth)
    return replica


def test_a_uniform_tree_grows_level_by_level_and_no_further() -> None:
    source = scripted()
    core = UniformCore(source, width=3, fan_out=2, levels=3)
    core.handle(OPEN)
    sizes: list[int] = []
    growths: list[Growth] = []
    for _ in range(5):
        growths += core.step()
        sizes.append(len(source.made))
    assert sizes == [1, 3, 6, 6, 6]  # 1, 2 and, of 4, as many as the width allows
    assert len(replica_of(growths).tree) == 2 * 6


def test_a_uniform_tree_is_thrown_away_at_an_outcome() -> None:
    source = scripted()
    core = UniformCore(source, width=4, fan_out=2, levels=2)
    core.handle(OPEN)
    for _ in range(2):
        core.step()
    assert core.handle(outcome(FIRST)) == []
    assert len(core.tree) == 0
    assert source.committed[1] == [5, 6, 7, FIRST]
    assert len(core.step()) == 1
    assert core.tree.root.expanded


def table(length: int = 2, fallback: int = 2, width: int = 8) -> tuple[TableCore, ScriptedSource]:
    source = scripted()
    core = TableCore(source, width, 3, TableShape(length, fallback, geometric=False))
    core.handle(OPEN)
    return core, source


def chain_below(replica: Replica, *path: int) -> int:
    """How many first guesses are ready below this path; -1: not even the path."""
    node = replica.tree.root
    for token in path:
        child = replica.tree.child(node, token)
        if child is None:
            return -1
        node = child
    ready = 0
    while node.expanded:
        node, ready = replica.tree.child_at(node, 0), ready + 1
    return ready


def test_a_table_prepares_a_chain_for_every_outcome_of_a_chain() -> None:
    core, source = table()
    growths = [growth for _ in range(8) for growth in core.step()]
    replica = replica_of(growths)
    for path in ((SECOND,), (THIRD,), (FIRST, SECOND), (FIRST, THIRD)):
        assert chain_below(replica, *path) == 2
    for bonus in (FIRST, SECOND, THIRD):  # after the whole chain
        assert chain_below(replica, FIRST, FIRST, bonus) == 2
    assert len(source.made) == 3 + 7 * 2
    assert core.step() == []


def test_a_table_never_expands_more_rows_than_a_step_has() -> None:
    core, source = table(width=4)
    before = 0
    for _ in range(8):
        core.step()
        assert len(source.made) - before <= 4
        before = len(source.made)


def test_a_prepared_outcome_is_the_next_chain_and_the_others_are_gone() -> None:
    core, source = table()
    for _ in range(8):
        core.step()
    core.handle(outcome(FIRST, SECOND))
    assert core.tree.root.expanded
    assert core.tree.ready_depth() == 2
    before = len(source.made)
    core.step()
    assert len(source.made) - before == 1 + 4  # the end of the chain, and outcomes of its two tokens


def test_after_a_miss_a_short_chain_comes_first() -> None:
    core, _ = table(fallback=2)
    for _ in range(8):
        core.step()
    core.handle(outcome(30))
    assert core.tree.ready_depth() == 0
    core.step()
    assert core.tree.ready_depth() == 1
    core.step()
    assert core.tree.ready_depth() == 2


def observed(acceptance: float, ranks: list[int], geometric: bool = True) -> FanOut:
    fan = FanOut(geometric, 16)
    fan.observe_chain(round(1000 * acceptance), False)
    for _ in range(round(1000 * (1 - acceptance))):
        fan.observe_chain(0, True)
    for rank, count in enumerate(ranks):
        for _ in range(count):
            fan.observe_bonus(rank)
    return fan


def test_the_fan_out_follows_the_published_formula() -> None:
    fan = observed(0.75, [100, 50, 25, 12, 6, 3])
    a, share = fan.acceptance, 1 / (1 + fan.exponent)
    assert a == pytest.approx(0.75, abs=0.01)
    weights = [a ** (k * share) for k in range(4)] + [a ** (4 * share) * (1 - a) ** -share]
    split = fan.split(40, 4)
    assert sum(split) == 40
    for found, weight in zip(split, weights, strict=True):
        assert found == pytest.approx(40 * weight / sum(weights), abs=1)
    assert split[0] > split[3] < split[4]


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_it_finds_the_exponent_that_misses_follow(exponent: float) -> None:
    missed = [1.0, *(guesses**-exponent for guesses in range(1, 17))]
    ranks = [round(10_000 * (missed[rank] - missed[rank + 1])) for rank in range(16)]
    assert observed(0.7, [*ranks, round(10_000 * missed[16])]).exponent == pytest.approx(exponent, rel=0.02)


def test_a_uniform_fan_out_shares_alike_and_none_exceeds_its_candidates() -> None:
    fan = observed(0.9, [100], geometric=False)
    assert sorted(fan.split(30, 4)) == [6, 6, 6, 6, 6]
    assert fan.split(1000, 2) == [15, 15, 16]
    assert fan.split(1, 3) == [0, 0, 0, 1]
