"""The drafter's core with blocks: its tree, the verifier's replica, calibration and limits."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from ssd_serve.base.draft_messages import Growth, Outcome
from ssd_serve.base.seeds import mix
from ssd_serve.cache.node import Node
from ssd_serve.cache.replica import Replica
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.drafter.blocks import grow_tree
from ssd_serve.drafter.calibration import Calibration
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.sources.contract import Block, Candidates, NodeRequest, Scales
from ssd_serve.drafter.sources.registry import SourceDescription
from tests.drafter.core_factory import ROOT, grown, opening
from tests.fakes import EOS, VOCABULARY, ScriptedSource

POSITIONS = 4
LIMITS = GrowthLimits(width=3, fan_out=3, depth=12, nodes=60)


class RandomBlocks(ScriptedSource):
    """Drafts random blocks; the same below the same node."""

    def __init__(self, paired: bool = False) -> None:
        super().__init__()
        self.paired = paired
        self.anchors: list[NodeRequest] = []

    def expand(self, requests: Sequence[NodeRequest], scales: Sequence[Scales]) -> Any:
        self.anchors += requests
        return [self.block(each.node) for each in requests]

    def block(self, name: int) -> Block:
        random = np.random.default_rng(name)
        tokens = np.stack([random.permutation(VOCABULARY)[:3] for _ in range(POSITIONS)]).astype(np.int32)
        values = -np.sort(random.exponential(1.0, (POSITIONS, 3))).astype(np.float32)
        pairs = -random.exponential(1.0, (POSITIONS - 1, 3, 3)).astype(np.float32) if self.paired else None
        return Block(tokens, values, values, np.zeros(POSITIONS, np.float32), pairs)


class OpenCore(DrafterCore):
    """Shows the tree of request 1 and the calibration."""

    @property
    def own_tree(self) -> SpeculationTree:
        return self._requests[1].tree

    @property
    def fitted(self) -> Calibration:
        return self._calibration


def block_core(source: RandomBlocks, block: int | None, limits: GrowthLimits = LIMITS) -> OpenCore:
    core = OpenCore(source, limits, (EOS,), "d0", description=SourceDescription(block=block), trees=grow_tree)
    core.handle(opening(max_tokens=10_000))
    return core


def candidates(nodes: Iterable[Node], most: int) -> dict[int, list[int]]:
    """The first candidates of expanded nodes by name."""
    return {node.name: node.tokens[:most] for node in nodes}


@given(
    st.booleans(),
    st.sampled_from([None, POSITIONS]),
    st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=6),
)
def test_the_replica_has_the_tree_of_the_drafter(
    paired: bool, block: int | None, rounds: list[list[int]]
) -> None:
    core = block_core(RandomBlocks(paired), block)
    replica = Replica(1, 1, ROOT, 1000, VOCABULARY)  # it keeps what the drafter drops
    position = 3
    for ranks in [[], *rounds]:
        for growth in grown(core):
            assert isinstance(growth, Growth)
            assert replica.apply(growth)
        drafted = candidates(core.own_tree.expanded(), 3)
        received = candidates(replica.tree.expanded(), 3)
        assert drafted.items() <= received.items()
        node, tokens = replica.tree.root, list[int]()
        for rank in ranks or [3]:  # a rank that no candidate has is a miss
            tokens.append(node.tokens[rank] if rank < len(node.tokens) else VOCABULARY - 1)
            child = replica.tree.child(node, tokens[-1])
            if child is None:
                break
            node = child
        root = replica.tree.root.name
        for token in tokens:
            root = mix(root, token)
        assert core.handle(Outcome(1, 1, position, tuple(tokens), root)) == []
        replica.advance(tuple(tokens))
        position += len(tokens)


def test_a_block_is_sent_as_positions_and_candidates() -> None:
    core = block_core(RandomBlocks(), POSITIONS)
    (growth,) = core.step()
    assert len(growth.counts) == 2 * POSITIONS
    assert len(growth.tokens) == 4 * 3 * POSITIONS
    assert len(growth.rows) // 2 == len(growth.parents) // 8 > POSITIONS


@pytest.mark.parametrize("block", [None, POSITIONS])
def test_anchors_are_roots_alone_or_leaves_by_reach(block: int | None) -> None:
    source = RandomBlocks()
    core = block_core(source, block, GrowthLimits(width=2, fan_out=3, depth=12, nodes=300))
    grown(core)
    assert source.anchors[0].node == ROOT
    if block is not None:
        assert len(source.anchors) == 1
        return
    assert len(source.anchors) > 5
    names = [each.node for each in source.anchors]
    assert len(set(names)) == len(names), "no node is an anchor twice"


def advance(core: DrafterCore, position: int, root: int, *tokens: int) -> int:
    """Commit tokens below a root; returns the new root."""
    for token in tokens:
        root = mix(root, token)
    assert core.handle(Outcome(1, 1, position, tokens, root)) == []
    return root


def test_a_root_within_an_older_block_is_an_anchor_again_and_a_root_that_was_an_anchor_is_not() -> None:
    source = RandomBlocks()
    core = block_core(source, None, GrowthLimits(width=4, fan_out=3, depth=12, nodes=1000))
    grown(core)
    inner = advance(core, 3, ROOT, int(source.block(ROOT).tokens[0, 0]))
    assert inner not in {each.node for each in source.anchors}
    source.anchors.clear()
    grown(core)
    assert source.anchors[0].node == inner
    prepared = source.anchors[1]
    root = advance(core, 4, inner, *prepared.tokens)
    assert root == prepared.node
    source.anchors.clear()
    grown(core)
    assert root not in {each.node for each in source.anchors}


def test_a_block_ends_where_the_text_must() -> None:
    source = RandomBlocks()
    core = DrafterCore(source, LIMITS, (EOS,), "d0", description=SourceDescription(block=POSITIONS))
    core.handle(opening(max_tokens=3))
    (growth,) = core.step()
    assert len(growth.counts) == 2 * 2, "the third token has no draft below it"


def test_choices_along_a_block_calibrate_each_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    source = RandomBlocks()
    core = block_core(source, POSITIONS)
    grown(core)
    seen: list[int] = []
    observe = core.fitted.observe

    def record(temperature: float, candidates: Any, token: int, depth: int = 0) -> None:
        seen.append(depth)
        assert tuple(candidates.tokens) == tuple(source.block(ROOT).tokens[depth])
        observe(temperature, candidates, token, depth)

    monkeypatch.setattr(core.fitted, "observe", record)
    tokens = tuple(int(each) for each in source.block(ROOT).tokens[:3, 0])
    root = ROOT
    for token in tokens:
        root = mix(root, token)
    core.handle(Outcome(1, 1, 3, tokens, root))
    assert len(seen) > 1
    assert seen == list(range(len(seen)))


class TwoLevels(RandomBlocks):
    """Candidates for the root and its children, blocks below; lent leaves stay undrafted while `width` is small."""

    def expand(self, requests: Sequence[NodeRequest], scales: Sequence[Scales]) -> Any:
        blocks = [self.block(each.node) for each in requests]
        return [
            block
            if len(each.tokens) >= 2
            else Candidates(block.tokens[0], block.log_probabilities[0], block.scores[0], 0.0)
            for each, block in zip(requests, blocks, strict=True)
        ]


def lending_core(lends: bool) -> OpenCore:
    description = SourceDescription(depth=2 + POSITIONS, lends=lends)
    limits = replace(LIMITS, nodes=600)
    core = OpenCore(TwoLevels(), limits, (EOS,), "d0", description=description)
    core.handle(opening(max_tokens=10_000))
    return core


def test_leaves_beside_a_block_get_its_candidates_until_they_are_drafted() -> None:
    """Borrowed nodes are below their own parent and less likely; the drafter's tree does not have them."""
    lending, plain = lending_core(lends=True), lending_core(lends=False)
    replica = Replica(1, 1, ROOT, 1000, VOCABULARY)
    borrowed, own = dict[int, list[int]](), dict[int, Node]()
    for _ in range(8):
        for growth in lending.step():
            assert isinstance(growth, Growth)
            assert replica.apply(growth)
        plain.step()
        own = {node.name: node for node in lending.own_tree.expanded()}
        assert own.keys() == {node.name for node in plain.own_tree.expanded()}
        now = {node.name: node for node in replica.tree.expanded()}
        lent = {name: node for name, node in now.items() if name not in own}
        for name, node in lent.items():
            assert node.parent is not None
            assert name == mix(node.parent.name, node.token)
            assert node.depth >= 2
        borrowed |= {name: list(node.tokens) for name, node in lent.items()}
        for name in borrowed.keys() & own.keys():  # drafted since: its own candidates come first
            assert now[name].tokens[:3] == own[name].tokens[:3]
    assert borrowed
    assert borrowed.keys() & own.keys()
