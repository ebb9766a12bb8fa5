"""Tests of drafters with grammars: the draft tokens are exactly those that the target may choose."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from ssd_serve.base.draft_messages import Open, Outcome
from ssd_serve.base.errors import GrammarError
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.base.seeds import mix, root_name
from ssd_serve.cache.node import Node
from ssd_serve.cache.replica import Replica
from ssd_serve.cache.slots import SlotPool
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.grammar_paths import GrammarPaths
from ssd_serve.drafter.sources.contract import (
    Branch,
    Candidates,
    DraftSource,
    ExpandResult,
    NodeRequest,
    Scales,
    Subtree,
)
from ssd_serve.drafter.sources.draft_model import ModelSource
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.sampling.processors import apply_masks
from ssd_serve.sampling.ranking import trusted_ranking
from tests.counting_grammar import Counting, CountingGrammars, may_come
from tests.fakes import EOS, VOCABULARY, FakeModel, ScriptedSource

LIMITS = GrowthLimits(width=3, fan_out=4, depth=6, nodes=300)
PARAMETERS = SamplingParameters(temperature=0.0, max_tokens=50, grammar="any")
PROMPT = (5, 6, 7)
ROOT = root_name(1, 1, 2)


class AtOnce(Executor):
    """Executor that runs each call at once, in the calling thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done = Future[Any]()
        try:
            done.set_result(fn(*args, **kwargs))
        except GrammarError as error:
            done.set_exception(error)
        return done


def followed() -> GrammarPaths:
    return GrammarPaths(CountingGrammars(), AtOnce())


class Drafted:
    """A drafter's core, with the replicas of its trees that a verifier would have."""

    def __init__(self, source: DraftSource, limits: GrowthLimits, paths: GrammarPaths | None) -> None:
        self.core = DrafterCore(source, limits, (EOS,), "d0", paths=paths)
        self.replicas: dict[int, Replica] = {}

    def open(self, request: int = 1, grammar: str = "any") -> None:
        root = root_name(request, 1, 2)
        self.replicas[request] = Replica(request, 1, root, 1000, VOCABULARY)
        parameters = SamplingParameters(temperature=0.0, max_tokens=50, grammar=grammar)
        self.core.handle(Open(request, 1, PROMPT, (), parameters, 9, root))

    def grow(self, steps: int = 4) -> None:
        for _ in range(steps):
            for growth in self.core.step():
                self.replicas[growth.request].apply(growth)

    def tree(self, request: int = 1) -> SpeculationTree:
        return self.replicas[request].tree

    def candidates(self, request: int = 1) -> list[tuple[int, ...]]:
        return [
            (*NodeRequest(request, node).tokens, token)
            for node in self.tree(request).expanded()
            for token in node.tokens
        ]


def matches(tokens: Sequence[int]) -> bool:
    return Counting((), 1000).consume(tokens) == len(tokens)


def a_model(fan_out: int = 4) -> ModelSource:
    return ModelSource(FakeModel(500), SlotPool(500), NoiseRows(VOCABULARY, 64), fan_out)


class UnrestrictedSource(ScriptedSource):
    """Draft source that ignores the grammar."""

    def __init__(self) -> None:
        super().__init__()
        self.candidates = list(range(1, 12))


class Chains:
    """Draft source that proposes two levels at once, as lookup does."""

    is_warmup_step = False

    def open(self, request: int, tokens: Sequence[int], parameters: SamplingParameters, seed: int) -> None:
        pass

    def commit(self, request: int, tokens: Sequence[int], path: Sequence[int], kept: Sequence[int]) -> None:
        pass

    def close(self, request: int) -> None:
        pass

    def expand(self, requests: Sequence[NodeRequest], scales: Sequence[Scales]) -> Sequence[ExpandResult]:
        first = list(range(1, 20))
        below = [Branch((token,), [3, 4, 5, 6], [-1.0] * 4) for token in first]
        return [Subtree([Branch((), first, [-2.0] * 19), *below]) for _ in requests]


@pytest.mark.parametrize(
    "source", [a_model(), UnrestrictedSource(), Chains()], ids=["model", "unrestricted", "chains"]
)
def test_all_draft_tokens_match_the_grammar(source: DraftSource) -> None:
    drafted = Drafted(source, LIMITS, followed())
    drafted.open()
    drafted.grow()
    found = drafted.candidates()
    assert found
    assert all(map(matches, found))
    assert len(found) == drafted.core.nodes
    # The next round begins after two of them.
    output = next(path for path in found if len(path) == 2)
    drafted.core.handle(Outcome(1, 1, 3, output, mix(mix(ROOT, output[0]), output[1])))
    drafted.replicas[1].advance(output)
    drafted.grow()
    later = drafted.candidates()
    assert later
    assert all(matches((*output, *path)) for path in later)


def test_a_model_ranks_allowed_tokens_only() -> None:
    drafted = Drafted(a_model(14), LIMITS, followed())
    drafted.open()
    drafted.grow(1)
    root = drafted.tree().root
    assert set(root.tokens) == may_come(())
    assert np.exp(root.cumulatives).sum() == pytest.approx(1)


def test_requests_without_grammar_are_unrestricted() -> None:
    alone, both = Drafted(a_model(), LIMITS, None), Drafted(a_model(), LIMITS, followed())
    alone.open(2, grammar="")
    both.open()
    both.open(2, grammar="")
    alone.grow(1)
    both.grow(1)
    first, other = alone.tree(2).root, both.tree(2).root
    assert (first.tokens, first.cumulatives) == (other.tokens, other.cumulatives)
    both.grow()
    assert all(map(matches, both.candidates()))


def test_drafts_are_unrestricted_until_a_grammar_is_compiled() -> None:
    ready = Event()
    compiler = ThreadPoolExecutor(1)
    compiler.submit(ready.wait, 30)
    paths, root = GrammarPaths(CountingGrammars(), compiler), SpeculationTree(1, 100).root
    for request, grammar in enumerate(("any", "wrong")):
        paths.open(request, SamplingParameters(grammar=grammar), ())
        paths.commit(request, (3,))
    requests = [NodeRequest(0, root), NodeRequest(1, root), NodeRequest(2, root)]
    assert [pick.allowed for pick in paths.with_allowed(requests)] == [None, None, None]
    ready.set()
    compiler.submit(int).result()
    first, *others = (pick.allowed for pick in paths.with_allowed(requests))
    assert first is not None
    assert np.array_equal(first, Counting((3,), 1000).masks()[0])
    assert others == [None, None]


def test_an_output_that_left_its_grammar_is_unrestricted() -> None:
    paths, root = followed(), SpeculationTree(1, 100).root
    paths.open(1, PARAMETERS, ())
    assert paths.with_allowed([NodeRequest(1, root)])[0].allowed is not None
    paths.commit(1, (EOS,))
    assert paths.with_allowed([NodeRequest(1, root)])[0].allowed is None
    paths.close(1)
    paths.close(1)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, VOCABULARY - 1)), max_size=20))
@settings(max_examples=50, deadline=None)
def test_masks_equal_those_of_a_fresh_state_for_each_path(grown: list[tuple[int, int]]) -> None:
    tree = SpeculationTree(1, 100)
    nodes: list[Node] = [tree.root]
    for above, token in grown:
        parent = nodes[above % len(nodes)]
        if not parent.tokens and tree.expand(parent, [token], [-0.5]):
            child = tree.child(parent, token)
            assert child is not None
            nodes.append(child)
    paths = followed()
    paths.open(1, PARAMETERS, ())
    for pick in paths.with_allowed([NodeRequest(1, node) for node in nodes]):
        assert pick.allowed is not None
        assert np.array_equal(pick.allowed, Counting(pick.tokens, 1000).masks()[0])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_native_ranking_with_masks_equals_torch(native: NativeLibrary, temperature: float) -> None:
    compiled = trusted_ranking(native)
    assert compiled is not None
    found: list[ExpandResult] = []
    for ranking in (None, compiled):
        source = ModelSource(FakeModel(200), SlotPool(200), NoiseRows(VOCABULARY, 64), 20, ranking)
        source.open(1, PROMPT, SamplingParameters(temperature=temperature), 5)
        mask = Counting((), 1000).masks()[0]
        found += source.expand([NodeRequest(1, Node(1, -1, None, 0.0), mask)], [[1.0]])
    one, other = found
    assert isinstance(one, Candidates)
    assert isinstance(other, Candidates)
    count = len(may_come(()))
    assert set(one.tokens[:count]) == may_come(())
    assert one.tokens[:count].tolist() == other.tokens[:count].tolist()
    assert np.allclose(one.log_probabilities[:count], other.log_probabilities[:count], atol=1e-4)
    assert one.expected_score == pytest.approx(other.expected_score, rel=1e-4)


def test_a_forced_token_has_probability_one() -> None:
    mask = np.zeros(2, dtype=np.int32)
    mask[0] = 1 << 9
    source = ModelSource(FakeModel(200), SlotPool(200), NoiseRows(VOCABULARY, 64), 3)
    source.open(1, PROMPT, PARAMETERS, 5)
    (found,) = source.expand([NodeRequest(1, Node(1, -1, None, 0.0), mask)], [[1.3]])
    assert isinstance(found, Candidates)
    assert (found.tokens[0], found.log_probabilities[0]) == (9, 0.0)


def test_rows_without_masks_are_unchanged() -> None:
    logits = torch.randn(3, VOCABULARY)
    assert apply_masks(logits, [None] * 3) is logits
    found = apply_masks(logits, [None, Counting((), 9).masks()[0], None])
    assert torch.equal(found[0::2], logits[0::2])
    assert {int(token) for token in torch.nonzero(found[1] > -torch.inf)} == may_come(())
