"""An EAGLE head as a draft source, against transformers' blocks that read each text from its beginning."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ssd_serve.base.errors import ProtocolError
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.cache.node import Node
from ssd_serve.cache.slots import SlotPool
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.drafter.sources.contract import Candidates, NodeRequest
from ssd_serve.drafter.sources.draft_model import MAX_PREFILL_ROWS
from ssd_serve.drafter.sources.eagle import EagleSource
from ssd_serve.sampling.noise_rows import NoiseRows
from tests.models.heads import FLAT, HIDDEN, VOCABULARY, FirstOracle, Oracle
from tests.models.test_heads import loaded, target

GREEDY = SamplingParameters(temperature=0.0)
FAN_OUT, SLOTS = 3, 128


class Told:
    """A source and a reference with the same inputs of one request; `vectors` are those of committed
    tokens."""

    def __init__(
        self,
        oracle: Oracle | FirstOracle,
        folder: Path,
        tokens: list[int],
        prefill_rows: int = MAX_PREFILL_ROWS,
    ) -> None:
        self.oracle, theirs = oracle, target(folder / "target")
        head = loaded(oracle.save(folder / "head", FLAT), theirs)
        oracle.adopt(load_file(theirs / "model.safetensors"))
        self.pool = SlotPool(SLOTS)
        self.source = EagleSource(
            head, self.pool, NoiseRows(VOCABULARY, 8), FAN_OUT, prefill_rows=prefill_rows
        )
        self.tokens, self.vectors = list(tokens), torch.zeros((0, HIDDEN))
        self.first = 0
        self.tree = SpeculationTree(1, 1000)
        self.own: dict[int, torch.Tensor] = {}
        self.source.open(1, tokens, GREEDY, 0)

    def give(self, position: int, count: int) -> None:
        vectors = torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(position))
        self.source.add(1, position, vectors)
        if position != self.first + len(self.vectors):
            self.first, self.vectors = position, vectors
        else:
            self.vectors = torch.cat((self.vectors, vectors))

    def expand(self, *nodes: Node) -> list[Candidates]:
        found = self.source.expand([NodeRequest(1, node) for node in nodes], [[1.0]] * len(nodes))
        grown = [each for each in found if each is not None]
        for node, each in zip(nodes, grown, strict=True):
            self.tree.expand(node, each.tokens.tolist(), each.log_probabilities.tolist())
        return grown

    def expected(self, node: Node) -> torch.Tensor:
        """Log-probabilities of what follows a node, computed from the first token that can be read on."""
        path = self.tree.path(node)
        above = [self.tree.root, *path][:-1]
        tokens = [*self.tokens[self.first + 1 :], *(each.token for each in path)]
        own = [self.own[each.name] for each in above] if path else []
        vectors = torch.cat((self.vectors, *(each[None] for each in own)))
        logits, said = self.oracle(torch.tensor(tokens), vectors)
        self.own[node.name] = said[-1]
        expected: torch.Tensor = logits[-1].log_softmax(-1)
        return expected

    def check(self, node: Node, found: Candidates) -> None:
        wanted = self.expected(node).topk(FAN_OUT)
        assert found.tokens.tolist() == wanted.indices.tolist()
        np.testing.assert_allclose(found.log_probabilities, wanted.values.numpy(), atol=1e-3)

    def commit(self, tokens: list[int]) -> None:
        position = len(self.tokens)
        advance = self.tree.advance(tokens)
        self.tokens += tokens
        self.give(position - 1, len(tokens))
        names = [node.name for node in advance.path]
        self.source.commit(1, tokens, names, [node.name for node in self.tree.expanded()])


@pytest.fixture(params=["EAGLE-1", "EAGLE-3"])
def oracle(request: pytest.FixtureRequest) -> Oracle | FirstOracle:
    return FirstOracle() if request.param == "EAGLE-1" else Oracle(proposed=VOCABULARY)


@pytest.fixture
def told(oracle: Oracle | FirstOracle, tmp_path: Path) -> Told:
    found = Told(oracle, tmp_path, [5, 9, 60, 33, 2, 71])
    found.give(0, 5)
    return found


def test_eagle_drafts_a_tree_below_a_prompt(told: Told) -> None:
    root = told.tree.root
    (first,) = told.expand(root)
    told.check(root, first)
    children = [told.tree.child_at(root, rank) for rank in range(2)]
    for node, found in zip(children, told.expand(*children), strict=True):
        told.check(node, found)
    grandchild = told.tree.child_at(children[1], 0)
    (last,) = told.expand(grandchild)
    told.check(grandchild, last)


def test_eagle_uses_target_features_after_a_miss(told: Told) -> None:
    told.expand(told.tree.root)
    missed = next(token for token in range(VOCABULARY) if token not in told.tree.root.tokens)
    for tokens in ([missed], [7, 8, 4]):
        told.commit(tokens)
        (found,) = told.expand(told.tree.root)
        told.check(told.tree.root, found)


def test_eagle_uses_its_own_outputs_below_a_hit(told: Told) -> None:
    """The committed token is computed with its true vector; the draft output stays."""
    (first,) = told.expand(told.tree.root)
    told.check(told.tree.root, first)
    child = told.tree.child_at(told.tree.root, 0)
    (second,) = told.expand(child)
    told.check(child, second)
    told.commit([child.token])
    assert told.tree.root is child
    leaf = told.tree.child_at(child, 1)
    (found,) = told.expand(leaf)
    told.check(leaf, found)


def test_eagle_waits_for_features(oracle: Oracle | FirstOracle, tmp_path: Path) -> None:
    waiting = Told(oracle, tmp_path, [5, 9, 60, 33])
    requests = [NodeRequest(1, waiting.tree.root)]
    assert waiting.source.expand(requests, [[1.0]]) == [None]
    waiting.give(0, 2)
    assert waiting.source.expand(requests, [[1.0]]) == [None]  # the third place is not known yet
    waiting.give(2, 1)
    (found,) = waiting.expand(waiting.tree.root)
    waiting.check(waiting.tree.root, found)


LONG = [place % (VOCABULARY - 1) + 1 for place in range(60)]


def test_a_long_prefill_is_chunked(oracle: Oracle | FirstOracle, tmp_path: Path) -> None:
    told = Told(oracle, tmp_path, LONG, prefill_rows=20)
    told.give(0, len(LONG) - 1)
    root = told.tree.root
    for _ in range(2):
        assert told.source.expand([NodeRequest(1, root)], [[1.0]]) == [None]
        assert set(told.source.pending_prefill) == {1}
    (found,) = told.expand(root)
    told.check(root, found)
    assert not told.source.pending_prefill


def test_a_request_closed_during_prefill_is_not_pending(oracle: Oracle | FirstOracle, tmp_path: Path) -> None:
    told = Told(oracle, tmp_path, LONG, prefill_rows=20)
    told.give(0, len(LONG) - 1)
    assert told.source.expand([NodeRequest(1, told.tree.root)], [[1.0]]) == [None]
    told.source.close(1)
    told.source.open(2, [3, 4], GREEDY, 0)
    assert told.source.expand([NodeRequest(2, SpeculationTree(2, 10).root)], [[1.0]]) == [None]
    assert not told.source.pending_prefill


def test_eagle_restarts_after_a_gap_in_features(told: Told) -> None:
    told.expand(told.tree.root)
    told.commit([11, 12])
    told.tokens += [13]
    told.tree = SpeculationTree(9, 1000)
    told.source.open(1, told.tokens, GREEDY, 0)
    told.give(6, 2)
    (found,) = told.expand(told.tree.root)
    told.check(told.tree.root, found)
    assert told.first == 6


@pytest.mark.parametrize(("position", "more"), [(0, -HIDDEN), (0, HIDDEN), (-1, 0)])
def test_invalid_features_are_a_protocol_error(told: Told, position: int, more: int) -> None:
    right = told.oracle.width
    with pytest.raises(ProtocolError, match=f"width {right + more}, not {right}, or a negative position"):
        told.source.read(1, position, torch.zeros((2, right + more)))
    told.source.read(1, 5, torch.zeros((2, right)))


def test_eagle_frees_all_slots(told: Told) -> None:
    for tokens in ([3], [4, 5], [6]):
        (found,) = told.expand(told.tree.root)
        told.expand(*[told.tree.child_at(told.tree.root, rank) for rank in range(FAN_OUT)])
        told.commit([int(found.tokens[0]), *tokens])
    told.expand(told.tree.root)
    assert told.pool.used == len(told.tokens) - 1
    told.source.close(1)
    assert told.pool.used == 0
