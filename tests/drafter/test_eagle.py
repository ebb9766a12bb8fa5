"""An EAGLE head as a draft source, against transformers' blocks that read each text from its beginning."""

import time
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
from ssd_serve.drafter.sources.eagle import EagleSource, step_seconds
from ssd_serve.kernels.batch import Batch
from ssd_serve.models.heads.eagle import EagleHead
from ssd_serve.models.interface import ForwardResult
from ssd_serve.sampling.noise_rows import NoiseRows
from tests.models.heads import FLAT, HIDDEN, VOCABULARY, FirstOracle, Oracle
from tests.models.test_heads import loaded, target

GREEDY = SamplingParameters(temperature=0.0)
FAN_OUT, SLOTS = 3, 128


class DraftedTree:
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
            (head, self.pool, NoiseRows(VOCABULARY, 8), FAN_OUT, None, prefill_rows), head
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
        grown = [each for each in found if isinstance(each, Candidates)]
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
def drafted(oracle: Oracle | FirstOracle, tmp_path: Path) -> DraftedTree:
    found = DraftedTree(oracle, tmp_path, [5, 9, 60, 33, 2, 71])
    found.give(0, 5)
    return found


def test_eagle_drafts_a_tree_below_a_prompt(drafted: DraftedTree) -> None:
    root = drafted.tree.root
    (first,) = drafted.expand(root)
    drafted.check(root, first)
    children = [drafted.tree.child_at(root, rank) for rank in range(2)]
    for node, found in zip(children, drafted.expand(*children), strict=True):
        drafted.check(node, found)
    grandchild = drafted.tree.child_at(children[1], 0)
    (last,) = drafted.expand(grandchild)
    drafted.check(grandchild, last)


def test_eagle_uses_target_features_after_a_miss(drafted: DraftedTree) -> None:
    drafted.expand(drafted.tree.root)
    missed = next(token for token in range(VOCABULARY) if token not in drafted.tree.root.tokens)
    for tokens in ([missed], [7, 8, 4]):
        drafted.commit(tokens)
        (found,) = drafted.expand(drafted.tree.root)
        drafted.check(drafted.tree.root, found)


def test_eagle_uses_its_own_outputs_below_a_hit(drafted: DraftedTree) -> None:
    """The committed token is computed with its true vector; the draft output stays."""
    (first,) = drafted.expand(drafted.tree.root)
    drafted.check(drafted.tree.root, first)
    child = drafted.tree.child_at(drafted.tree.root, 0)
    (second,) = drafted.expand(child)
    drafted.check(child, second)
    drafted.commit([child.token])
    assert drafted.tree.root is child
    leaf = drafted.tree.child_at(child, 1)
    (found,) = drafted.expand(leaf)
    drafted.check(leaf, found)


def test_eagle_waits_for_features(oracle: Oracle | FirstOracle, tmp_path: Path) -> None:
    waiting = DraftedTree(oracle, tmp_path, [5, 9, 60, 33])
    requests = [NodeRequest(1, waiting.tree.root)]
    assert waiting.source.expand(requests, [[1.0]]) == [None]
    waiting.give(0, 2)
    assert waiting.source.expand(requests, [[1.0]]) == [None]  # the third place is not known yet
    waiting.give(2, 1)
    (found,) = waiting.expand(waiting.tree.root)
    waiting.check(waiting.tree.root, found)


LONG = [place % (VOCABULARY - 1) + 1 for place in range(60)]


def test_a_long_prefill_is_chunked(oracle: Oracle | FirstOracle, tmp_path: Path) -> None:
    drafted = DraftedTree(oracle, tmp_path, LONG, prefill_rows=20)
    drafted.give(0, len(LONG) - 1)
    root = drafted.tree.root
    for _ in range(2):
        assert drafted.source.expand([NodeRequest(1, root)], [[1.0]]) == [None]
        assert set(drafted.source.pending_prefill) == {1}
    (found,) = drafted.expand(root)
    drafted.check(root, found)
    assert not drafted.source.pending_prefill


def test_a_request_closed_during_prefill_is_not_pending(oracle: Oracle | FirstOracle, tmp_path: Path) -> None:
    drafted = DraftedTree(oracle, tmp_path, LONG, prefill_rows=20)
    drafted.give(0, len(LONG) - 1)
    assert drafted.source.expand([NodeRequest(1, drafted.tree.root)], [[1.0]]) == [None]
    drafted.source.close(1)
    drafted.source.open(2, [3, 4], GREEDY, 0)
    assert drafted.source.expand([NodeRequest(2, SpeculationTree(2, 10).root)], [[1.0]]) == [None]
    assert not drafted.source.pending_prefill


def test_eagle_restarts_after_a_gap_in_features(drafted: DraftedTree) -> None:
    drafted.expand(drafted.tree.root)
    drafted.commit([11, 12])
    drafted.tokens += [13]
    drafted.tree = SpeculationTree(9, 1000)
    drafted.source.open(1, drafted.tokens, GREEDY, 0)
    drafted.give(6, 2)
    (found,) = drafted.expand(drafted.tree.root)
    drafted.check(drafted.tree.root, found)
    assert drafted.first == 6


@pytest.mark.parametrize(("position", "more"), [(0, -HIDDEN), (0, HIDDEN), (-1, 0)])
def test_invalid_features_are_a_protocol_error(drafted: DraftedTree, position: int, more: int) -> None:
    right = drafted.oracle.width
    with pytest.raises(ProtocolError, match=f"width {right + more}, not {right}, or a negative position"):
        drafted.source.read(1, position, torch.zeros((2, right + more)))
    drafted.source.read(1, 5, torch.zeros((2, right)))


def test_eagle_frees_all_slots(drafted: DraftedTree) -> None:
    for tokens in ([3], [4, 5], [6]):
        (found,) = drafted.expand(drafted.tree.root)
        drafted.expand(*[drafted.tree.child_at(drafted.tree.root, rank) for rank in range(FAN_OUT)])
        drafted.commit([int(found.tokens[0]), *tokens])
    drafted.expand(drafted.tree.root)
    assert drafted.pool.used == len(drafted.tokens) - 1
    drafted.source.close(1)
    assert drafted.pool.used == 0


@pytest.mark.parametrize("width", [1, 8])
def test_a_measured_step_is_a_whole_one_and_leaves_nothing(
    oracle: Oracle | FirstOracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    theirs = target(tmp_path / "target")
    head, pool = loaded(oracle.save(tmp_path / "head", FLAT), theirs), SlotPool(SLOTS)
    source = EagleSource((head, pool, NoiseRows(VOCABULARY, 8), FAN_OUT, None, MAX_PREFILL_ROWS), head)
    forward, wanted = EagleHead.forward, list[int]()

    def slow(head: EagleHead, batch: Batch) -> ForwardResult:
        wanted.append(len(batch.rows_wanted))
        time.sleep(0.005)
        return forward(head, batch)

    monkeypatch.setattr(EagleHead, "forward", slow)
    assert step_seconds(source, head.width, width) >= 0.005
    assert wanted == 4 * [width]
    assert pool.used == 0
    assert not source.held
