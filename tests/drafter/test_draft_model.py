"""A draft model has KV of exactly the expanded nodes and loses no slot, in any order of operations."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.cache.node import Node
from ssd_serve.cache.slots import SlotPool
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.drafter.sources.contract import Candidates, NodeRequest
from ssd_serve.drafter.sources.draft_model import ModelSource
from ssd_serve.kernels.batch import Batch
from ssd_serve.models.interface import ForwardResult
from ssd_serve.sampling.noise_rows import NoiseRows
from tests.cache.tree_access import candidates as ranked_nodes
from tests.examples import examples
from tests.fakes import VOCABULARY, FakeModel

FAN_OUT = 3
PROMPT = st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=12)
PARAMETERS = (SamplingParameters(temperature=0.0), SamplingParameters(temperature=1.0))


class DraftRequest:
    """A request in the core, and the number of its tokens that should have KV."""

    def __init__(self, request: int, tokens: list[int]) -> None:
        self.request = request
        self.tokens = tokens
        self.parameters = PARAMETERS[request % 2]
        self.tree = SpeculationTree(1000 + request, 10_000)
        self.fed = 0

    def open_nodes(self) -> list[Node]:
        """Unexpanded nodes with expanded ancestors."""
        if not self.tree.root.expanded:
            return [self.tree.root]
        return [node for node in ranked_nodes(self.tree)[:30] if not node.expanded]

    def pick(self, node: Node) -> NodeRequest:
        return NodeRequest(self.request, node)

    def kv(self) -> int:
        """Slots that the request should hold."""
        return self.fed + sum(node is not self.tree.root for node in self.tree.expanded())


def make_source(slots: int) -> tuple[ModelSource, SlotPool]:
    pool = SlotPool(slots)
    return ModelSource(FakeModel(slots), pool, NoiseRows(VOCABULARY, 64), FAN_OUT), pool


def from_scratch(drafted: DraftRequest, pick: NodeRequest) -> Candidates:
    """The same expansion by a source that has nothing to remember."""
    source, _ = make_source(200)
    source.open(0, [*drafted.tokens, *pick.tokens], drafted.parameters, 5)
    root = NodeRequest(0, Node(1, -1, None, 0.0))
    found = source.expand([root], [[1.0]])[0]
    assert found is not None
    return found


class Source(RuleBasedStateMachine):
    """Requests come, grow, move and go."""

    slots = 2000

    def __init__(self) -> None:
        super().__init__()
        self.source, self.pool = make_source(self.slots)
        self.requests: dict[int, DraftRequest] = {}

    @rule(request=st.integers(0, 3), prompt=PROMPT)
    def open(self, request: int, prompt: list[int]) -> None:
        drafted = self.requests[request] = DraftRequest(request, prompt)
        self.source.open(request, prompt, drafted.parameters, 5)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.requests)))
        del self.requests[request]
        self.source.close(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def expand(self, data: st.DataObject) -> None:
        places = [
            (drafted, node) for _, drafted in sorted(self.requests.items()) for node in drafted.open_nodes()
        ]
        wanted = data.draw(
            st.lists(st.integers(0, len(places) - 1), min_size=1, max_size=4, unique=True), label="requests"
        )
        nodes = [places[index] for index in wanted]
        requests = [drafted.pick(node) for drafted, node in nodes]
        found = self.source.expand(requests, [[1.0]] * len(requests))
        for (drafted, node), pick, candidates in zip(nodes, requests, found, strict=True):
            if candidates is not None:
                self.check(drafted, pick, candidates)
                tokens: list[int] = candidates.tokens.tolist()
                assert drafted.tree.expand(node, tokens, candidates.log_probabilities.tolist())
                drafted.fed = len(drafted.tokens)
            else:
                assert self.slots < 2000

    def check(self, drafted: DraftRequest, pick: NodeRequest, candidates: Candidates) -> None:
        expected = from_scratch(drafted, pick)
        assert candidates.tokens.tolist() == expected.tokens.tolist()
        assert np.allclose(candidates.log_probabilities, expected.log_probabilities, atol=1e-6)
        assert (np.diff(candidates.log_probabilities) <= 0).all()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), length=st.integers(1, 4), miss=st.booleans())
    def commit(self, data: st.DataObject, length: int, miss: bool) -> None:
        drafted = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        node, tokens = drafted.tree.root, list[int]()
        while len(tokens) < length and node.expanded:
            node = drafted.tree.child_at(node, data.draw(st.integers(0, FAN_OUT - 1)))
            tokens.append(node.token)
        if miss or not tokens:
            tokens.append(data.draw(st.integers(1, VOCABULARY - 1)))
        advance = drafted.tree.advance(tokens)
        kept = [each.name for each in drafted.tree.expanded()]
        self.source.commit(drafted.request, tokens, [each.name for each in advance.path], kept)
        if drafted.fed == len(drafted.tokens):
            expanded = [each.expanded for each in advance.path]
            drafted.fed += expanded.index(False) if False in expanded else len(expanded)
        drafted.tokens.extend(tokens)

    @invariant()
    def kv_exists_exactly_for_what_was_expanded(self) -> None:
        assert self.pool.used == sum(drafted.kv() for drafted in self.requests.values())

    def teardown(self) -> None:
        for request in list(self.requests):
            self.source.close(request)
        assert self.pool.used == 0


class ShortOfMemory(Source):
    """The same with too few slots: requests lose their KV to each other, and nothing else."""

    slots = 30

    @invariant()
    def kv_exists_exactly_for_what_was_expanded(self) -> None:
        assert self.pool.used <= self.slots


TestSource = Source.TestCase
TestSource.settings = settings(max_examples=examples(40), stateful_step_count=20, deadline=None)
TestShortOfMemory = ShortOfMemory.TestCase
TestShortOfMemory.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)


class Scarce(FakeModel):
    """Has no memory left while it is `full`."""

    full = False

    def forward(self, batch: Batch) -> ForwardResult:
        if self.full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(batch)


def test_out_of_memory_grows_nothing_and_leaks_no_slots() -> None:
    pool, model = SlotPool(100), Scarce(100)
    source = ModelSource(model, pool, NoiseRows(VOCABULARY, 64), FAN_OUT)
    drafted = DraftRequest(0, [3, 4, 5])
    source.open(0, [3, 4, 5], drafted.parameters, 5)
    pick = drafted.pick(drafted.tree.root)
    for full in (True, True, False, True, False):
        model.full = full
        used = pool.used
        found = source.expand([pick], [[1.0]])[0]
        if full:
            assert found is None
            assert pool.used in (used, used - 1)  # the root is read anew
        else:
            assert found is not None
            assert found.tokens.tolist() == from_scratch(drafted, pick).tokens.tolist()
            assert pool.used == 3


def reading(source: ModelSource, pick: NodeRequest) -> tuple[int, Candidates | None]:
    """After how many steps there is an answer, and which."""
    for steps in range(1, 100):
        found = source.expand([pick], [[1.0]])[0]
        if not source.pending_prefill:
            return steps, found
        assert found is None
    raise AssertionError("it never ends")


@pytest.mark.parametrize(("rows", "steps"), [(17, 5), (20, 4), (69, 2), (70, 1), (512, 1)])
def test_a_long_prefill_is_chunked(rows: int, steps: int) -> None:
    pool, model = SlotPool(200), FakeModel(200)
    source = ModelSource(model, pool, NoiseRows(VOCABULARY, 64), FAN_OUT, prefill_rows=rows)
    drafted = DraftRequest(0, [index % (VOCABULARY - 1) + 1 for index in range(70)])
    source.open(0, drafted.tokens, drafted.parameters, 5)
    took, found = reading(source, drafted.pick(drafted.tree.root))
    assert found is not None
    assert found.tokens.tolist() == from_scratch(drafted, drafted.pick(drafted.tree.root)).tokens.tolist()
    assert (took, model.rows, pool.used) == (steps, 70, 70)


def test_decodes_and_prefills_share_a_step() -> None:
    source = ModelSource(FakeModel(300), SlotPool(300), NoiseRows(VOCABULARY, 64), FAN_OUT, prefill_rows=20)
    requests = [DraftRequest(request, [1] * length) for request, length in enumerate((50, 3, 50, 12))]
    for each in requests:
        source.open(each.request, each.tokens, each.parameters, 5)
    found = source.expand([each.pick(each.tree.root) for each in requests], [[1.0]] * 4)
    assert [each is not None for each in found] == [False, True, False, True]
    assert set(source.pending_prefill) == {0, 2}


def test_a_prefill_without_slots_is_given_up() -> None:
    source = ModelSource(FakeModel(30), SlotPool(30), NoiseRows(VOCABULARY, 64), FAN_OUT, prefill_rows=20)
    drafted = DraftRequest(0, [1] * 70)
    source.open(0, drafted.tokens, drafted.parameters, 5)
    assert reading(source, drafted.pick(drafted.tree.root)) == (2, None)


def test_a_hit_reuses_the_kv_of_accepted_nodes() -> None:
    pool = SlotPool(100)
    model = FakeModel(100)
    source = ModelSource(model, pool, NoiseRows(VOCABULARY, 64), FAN_OUT)
    drafted = DraftRequest(0, [3, 4, 5])
    source.open(0, [3, 4, 5], drafted.parameters, 5)
    for _ in range(3):
        node = drafted.open_nodes()[0]
        found = source.expand([drafted.pick(node)], [[1.0]])[0]
        assert found is not None
        drafted.tree.expand(node, found.tokens.tolist(), found.log_probabilities.tolist())
    assert model.rows == 3 + 2
    child = drafted.tree.child_at(drafted.tree.root, 0)
    advance = drafted.tree.advance([child.token])
    kept = [each.name for each in drafted.tree.expanded()]
    source.commit(0, [child.token], [each.name for each in advance.path], kept)
    source.expand([drafted.pick(drafted.open_nodes()[0])], [[1.0]])
    assert model.rows == 3 + 2 + 1


def test_a_step_with_a_prefill_is_a_warmup_step() -> None:
    source, _ = make_source(100)
    drafted = DraftRequest(0, [3 + index % 5 for index in range(17)])

    def expand() -> bool:
        node = drafted.open_nodes()[0]
        found = source.expand([drafted.pick(node)], [[1.0]])[0]
        assert found is not None
        drafted.tree.expand(node, found.tokens.tolist(), found.log_probabilities.tolist())
        return source.is_warmup_step

    def commit(count: int) -> None:
        wrong = [VOCABULARY - 1] * count
        drafted.tree.advance(wrong)
        source.commit(0, wrong, [], [])

    source.open(0, drafted.tokens, drafted.parameters, 5)
    assert expand()
    assert not expand()
    commit(16)
    assert not expand()
    commit(17)
    assert expand()


def test_slots_are_evicted_from_the_least_recently_expanded_request() -> None:
    source, pool = make_source(24)
    drafted = [DraftRequest(request, list(range(1, 9))) for request in range(4)]
    for each in drafted:
        source.open(each.request, each.tokens, each.parameters, 5)
        assert source.expand([each.pick(each.tree.root)], [[1.0]])[0] is not None
    assert pool.used == 24
    assert source.expand([drafted[1].pick(drafted[1].tree.root)], [[1.0]])[0] is not None
    assert pool.used == 24
