"""The replica against a real drafter core over a network that loses, duplicates, delays and reorders."""

from dataclasses import dataclass
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from ssd_serve.base.draft_messages import (
    DrafterMessage,
    Growth,
    Open,
    Outcome,
    Resync,
)
from ssd_serve.base.errors import ProtocolError
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.base.seeds import mix, root_name
from ssd_serve.cache.expansions import ROOT_STEP, Expansion, pack
from ssd_serve.cache.replica import Replica
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from tests.cache.tree_access import candidates
from tests.examples import examples
from tests.fakes import VOCABULARY, ScriptedSource, core_of

LIMITS = GrowthLimits(width=3, fan_out=3, depth=6, nodes=5000)
REQUEST = 4
PROMPT = (5, 6, 7)
PARAMETERS = SamplingParameters(max_tokens=1000, ignore_eos=True)


@dataclass
class Endpoints:
    """A drafter core, the verifier's replica, and the committed output."""

    source: ScriptedSource
    core: DrafterCore
    replica: Replica
    output: list[int]
    epoch: int = 0

    def open(self) -> Open:
        """Start a new epoch with a fresh replica; returns its `Open`."""
        self.epoch += 1
        root = root_name(REQUEST, self.epoch, len(PROMPT) + len(self.output) - 1)
        self.replica = make_replica(self.epoch, root)
        return Open(REQUEST, self.epoch, PROMPT, tuple(self.output), PARAMETERS, 1, root)

    def commit(self, tokens: tuple[int, ...]) -> Outcome:
        """Advance the replica; returns the `Outcome`."""
        position = len(PROMPT) + len(self.output)
        self.output.extend(tokens)
        self.replica.advance(tokens)
        return Outcome(REQUEST, self.epoch, position, tokens, self.replica.tree.root.name)

    def expected(self) -> dict[int, list[int]]:
        """Candidates of the drafter's tree below the replica's root, by node name."""
        found: dict[int, list[int]] = {}
        waiting = [self.replica.tree.root.name]
        while waiting:
            name = waiting.pop()
            if name in self.source.made:
                found[name] = self.source.made[name]
                waiting.extend(mix(name, token) for token in found[name])
        return found


def make_replica(epoch: int, root: int) -> Replica:
    return Replica(REQUEST, epoch, root, limit=5000, vocabulary=VOCABULARY)


def make_ends() -> Endpoints:
    source = ScriptedSource()
    core = core_of(source, LIMITS)
    return Endpoints(source, core, make_replica(0, 0), [])


def contents(tree: SpeculationTree) -> dict[int, list[int]]:
    return {node.name: node.tokens for node in tree.expanded()}


class Network(RuleBasedStateMachine):
    """Messages in both directions may be lost, duplicated and reordered."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = make_ends()
        self.there: list[DrafterMessage] = [self.ends.open()]
        self.back: list[DrafterMessage] = []

    @rule()
    def draft(self) -> None:
        self.back.extend(self.ends.core.step())

    @rule(data=st.data(), length=st.integers(1, 4), miss=st.booleans())
    def commit(self, data: st.DataObject, length: int, miss: bool) -> None:
        node, tokens = self.ends.replica.tree.root, list[int]()
        for _ in range(length):
            if not node.tokens:
                break
            node = self.ends.replica.tree.child_at(node, data.draw(st.integers(0, len(node.tokens) - 1)))
            tokens.append(node.token)
        if miss or not tokens:
            tokens.append(data.draw(st.integers(0, VOCABULARY - 1)))
        self.there.append(self.ends.commit(tuple(tokens)))

    @precondition(lambda self: self.there)
    @rule(data=st.data(), fate=st.sampled_from(["deliver", "deliver", "lose", "double"]))
    def move_there(self, data: st.DataObject, fate: str) -> None:
        index = data.draw(st.integers(0, len(self.there) - 1))
        message = self.there[index] if fate == "double" else self.there.pop(index)
        if fate != "lose":
            self.to_drafter(message)

    @precondition(lambda self: self.back)
    @rule(data=st.data(), fate=st.sampled_from(["deliver", "deliver", "lose", "double"]))
    def move_back(self, data: st.DataObject, fate: str) -> None:
        index = data.draw(st.integers(0, len(self.back) - 1))
        message = self.back[index] if fate == "double" else self.back.pop(index)
        if fate != "lose":
            self.to_verifier(message)

    @rule()
    def calm(self) -> None:
        """The network delivers everything, and a snapshot fills the gaps: both sides agree."""
        self.settle()
        for _ in range(4):
            self.back.extend(self.ends.core.step())
        # An unexpected outcome makes the drafter resynchronise.
        self.there.append(self.ends.commit((1,)))
        self.settle()
        self.back.extend(self.ends.core.step())
        self.there.append(Resync(REQUEST, self.ends.epoch))
        self.settle()
        assert self.ends.source.committed[REQUEST] == [*PROMPT, *self.ends.output]
        assert self.ends.replica.tree.root.name in self.ends.source.made
        # The replica may hold more: nodes that the drafter dropped when it was opened twice.
        assert self.ends.expected().items() <= contents(self.ends.replica.tree).items()

    def settle(self) -> None:
        while self.there or self.back:
            while self.there:
                self.to_drafter(self.there.pop(0))
            while self.back:
                self.to_verifier(self.back.pop(0))

    def to_drafter(self, message: DrafterMessage) -> None:
        self.back.extend(self.ends.core.handle(message))

    def to_verifier(self, message: DrafterMessage) -> None:
        if isinstance(message, Resync) and message.epoch == self.ends.epoch:
            self.there.append(self.ends.open())
        elif isinstance(message, Growth) and not self.ends.replica.apply(message):
            self.there.append(Resync(REQUEST, self.ends.epoch))

    @invariant()
    def the_replica_holds_only_what_the_drafter_made(self) -> None:
        for node in self.ends.replica.tree.expanded():
            assert set(node.tokens) <= set(ScriptedSource.tokens_of(node.name))


TestNetwork = Network.TestCase
TestNetwork.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


@given(st.randoms(use_true_random=False), st.integers(1, 6))
@settings(max_examples=examples(40))
def test_the_replica_equals_the_drafters_tree_in_any_message_order(order: Random, steps: int) -> None:
    ends = make_ends()
    ends.core.handle(ends.open())
    growth = [message for _ in range(steps) for message in ends.core.step()]
    doubled = growth + growth[::2]
    order.shuffle(doubled)
    for message in doubled:
        ends.replica.apply(message)
    assert contents(ends.replica.tree) == ends.expected()
    assert len(ends.expected()) >= steps


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_root_names_agree_on_hits_and_misses(ranks: list[int]) -> None:
    ends = make_ends()
    ends.core.handle(ends.open())
    for rank in ranks:
        for message in ends.core.step():
            ends.replica.apply(message)
        root = ends.replica.tree.root
        token = root.tokens[rank] if rank < len(root.tokens) else (root.tokens[0] + 1) % VOCABULARY
        assert ends.core.handle(ends.commit((token,))) == []  # else: Resync


def growth_of(*expansions: Expansion, sequence: int = 0, snapshot: bool = False) -> Growth:
    return pack(REQUEST, 1, sequence, expansions, "d0", snapshot)


ROOT_EXPANSION = Expansion(50, ROOT_STEP, [1, 2], [-0.5, -1.0])
BELOW = Expansion(50, 1, [3, 4], [-0.5, -1.0])


def test_other_requests_epochs_and_malformed_buffers_change_nothing() -> None:
    replica = make_replica(1, 50)
    good = growth_of(ROOT_EXPANSION)
    impossible = growth_of(Expansion(50, ROOT_STEP, [1, VOCABULARY], [-0.5, -1.0]))
    for message in (
        replace(good, request=9),
        replace(good, epoch=2),
        replace(good, epoch=0),
        impossible,
    ):
        assert replica.apply(message)
    for message in (replace(good, tokens=good.tokens[:-1]), replace(good, counts=b"")):
        with pytest.raises(ProtocolError):
            replica.apply(message)
    assert len(replica.tree) == 0
    replica.apply(good)
    assert replica.tree.root.tokens == [1, 2]


def test_growth_for_a_future_root_is_kept() -> None:
    replica = make_replica(1, 50)
    replica.apply(growth_of(Expansion(mix(50, 9), ROOT_STEP, [3], [-0.5])))
    replica.advance((9,))
    assert contents(replica.tree) == {mix(50, 9): [3]}
    assert replica.take_late() == 0


def test_orphaned_growth_is_dropped_after_two_rounds() -> None:
    replica = make_replica(1, 50)
    late = mix(mix(mix(50, 9), 9), 9)
    replica.apply(growth_of(Expansion(late, ROOT_STEP, [3], [-0.5])))
    for _ in range(3):
        replica.advance((9,))
    assert replica.tree.root.name == late
    assert len(replica.tree) == 0
    assert [replica.take_late(), replica.take_late()] == [1, 0]


def test_a_sequence_gap_is_reported_once_and_snapshots_are_exempt() -> None:
    replica = make_replica(1, 50)
    assert replica.apply(growth_of(ROOT_EXPANSION, sequence=0))
    assert not replica.apply(growth_of(sequence=2))
    assert replica.apply(growth_of(sequence=3))
    assert replica.apply(growth_of(sequence=1))
    assert replica.apply(growth_of(sequence=9, snapshot=True))
    assert replica.apply(growth_of(sequence=10))
    assert replica.apply(growth_of(sequence=0), sender=1)
    assert not replica.apply(growth_of(sequence=2), sender=1)


def test_two_drafters_share_a_tree() -> None:
    replica = make_replica(1, 50)
    replica.apply(growth_of(ROOT_EXPANSION))
    replica.apply(growth_of(Expansion(50, ROOT_STEP, [2, 8], [-0.1, -0.7])), sender=1)
    replica.apply(growth_of(Expansion(50, 8, [6], [-0.1]), sequence=1), sender=1)
    assert contents(replica.tree) == {50: [2, 1, 8], mix(50, 8): [6]}


def places(replica: Replica, count: int) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
    """Paths, tokens and parents' indices of the best nodes, as in a round."""
    nodes = candidates(replica.tree)[:count]
    paths = [tuple(each.token for each in replica.tree.path(node)) for node in nodes]
    return (
        paths,
        [node.token for node in nodes],
        [paths.index(path[:-1]) if path[1:] else -1 for path in paths],
    )


@given(st.data())
@settings(max_examples=examples(60), deadline=None)
def test_sources_of_each_candidate_are_tracked(data: st.DataObject) -> None:
    replica, sequence = make_replica(1, 50), 0
    named: dict[tuple[int, ...], int] = {}
    for _ in range(data.draw(st.integers(1, 4))):
        for _ in range(data.draw(st.integers(1, 8))):
            path = data.draw(st.sampled_from([(), *sorted(named)]))
            tokens = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True))
            source = data.draw(st.sampled_from([2, 4, 8]))
            named |= {(*path, token): named.get((*path, token), 0) | source for token in tokens}
            above = name = replica.tree.root.name
            for token in path:
                above, name = name, mix(name, token)
            values = [-0.5 - place for place in range(len(tokens))]
            expansion = Expansion(above, path[-1] if path else ROOT_STEP, tokens, values)
            replica.apply(growth_of(expansion, sequence=sequence), source, source)
            sequence += 1
        paths, tokens, parents = places(replica, data.draw(st.integers(0, 40)))
        assert replica.sources_of(tokens, parents) == [named[path] for path in paths]
        root = data.draw(st.sampled_from(sorted(named)))
        assert replica.advance(root).hit
        named = {
            path[len(root) :]: sources for path, sources in named.items() if path[: len(root)] == root != path
        }


def test_restart_expects_sequence_0() -> None:
    replica = make_replica(1, 50)
    for sequence in range(5):
        assert replica.apply(growth_of(sequence=sequence))
    assert replica.apply(growth_of(sequence=0))
    assert replica.apply(growth_of(sequence=2))  # without `restart`
    replica.restart(0)
    assert replica.apply(growth_of(sequence=0))
    assert not replica.apply(growth_of(sequence=2))


def test_full_replica_drops_growth() -> None:
    replica = Replica(REQUEST, 1, 50, limit=3, vocabulary=VOCABULARY)
    assert replica.apply(growth_of(ROOT_EXPANSION, BELOW))
    assert len(replica.tree) == 2
    assert replica.advance((1,)).hit
    assert replica.apply(growth_of(Expansion(50, 1, [3, 4], [-0.5, -1.0]), sequence=1))
    assert replica.tree.root.tokens == [3, 4]


def test_orphans_are_bounded_by_candidates_and_do_not_keep_messages() -> None:
    replica = Replica(REQUEST, 1, 50, limit=100, vocabulary=VOCABULARY)
    for parent in range(1000, 1300):
        replica.apply(growth_of(*[Expansion(parent, step, [1, 2], [-0.5, -1.0]) for step in range(300)]))
    orphans = [each for several in replica._orphans.values() for each in several]  # pyright: ignore[reportPrivateUsage]
    assert sum(each.expansion.size for each in orphans) <= 100
    assert sum(len(each.expansion.tokens) for each in orphans) <= 400


def test_the_merge_budget_bounds_one_message() -> None:
    replica = Replica(REQUEST, 1, 50, limit=5000, vocabulary=10_000)
    wide = list(range(4000))
    replica.apply(growth_of(Expansion(50, ROOT_STEP, wide, [-9.0] * 4000)))
    better = [Expansion(50, ROOT_STEP, [token], [-1.0]) for token in wide]
    replica.apply(growth_of(*better, sequence=1))
    assert 0 < sum(value == -1.0 for value in replica.tree.root.cumulatives) < 10
    replica.apply(growth_of(*better[-2:], sequence=2))
    assert replica.tree.root.tokens.index(3999) < 10, "the next message has a budget of its own"
