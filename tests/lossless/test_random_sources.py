"""A source with any output that the contract's types allow: plain outputs, no exception."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.bench.lossless.drafters import RigDraft
from ssd_serve.bench.lossless.rig import GROWTH, Case
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.sources.contract import Branch, Candidates, ExpandResult, NodeRequest, Scales, Subtree
from tests.lossless.every_source import EverySource

VOCABULARY = 257
VALUES = [-0.1, -1.0, -1.0, -90.0, 0.0, 3.0, -3e38, float("inf"), -float("inf"), float("nan")]


class WildSource:
    """A stateless source with random output."""

    is_warmup_step = False

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def open(self, request: int, tokens: Sequence[int], parameters: SamplingParameters, seed: int) -> None:
        pass

    def commit(self, request: int, tokens: Sequence[int], path: Sequence[int], kept: Sequence[int]) -> None:
        pass

    def close(self, request: int) -> None:
        pass

    def expand(self, requests: Sequence[NodeRequest], scales: Sequence[Scales]) -> Sequence[ExpandResult]:
        return [self._random.choice((self._nothing, self._candidates, self._subtree))() for _ in requests]

    def _nothing(self) -> ExpandResult:
        return None

    def _candidates(self) -> ExpandResult:
        tokens = np.array(self._tokens(40), dtype=np.int32)
        values = np.array(self._values(len(tokens)), dtype=np.float32)
        return Candidates(tokens, values, values, self._random.choice(VALUES))

    def _subtree(self) -> ExpandResult:
        """Random branches; some paths continue earlier tokens."""
        branches: list[Branch] = []
        paths: list[tuple[int, ...]] = [()]
        for _ in range(self._random.randrange(6)):
            path, tokens = self._random.choice(paths), self._tokens(5)
            branches.append(Branch(path, tokens, self._values(len(tokens))))
            paths += [(*path, token) for token in tokens] + [(*path, 7)]
        return Subtree(branches)

    def _tokens(self, most: int) -> list[int]:
        """Random tokens with duplicates, rarely one outside the vocabulary."""
        few = [self._random.randrange(60, 80) for _ in range(self._random.randrange(most))]
        return [*few, self._random.choice((-1, VOCABULARY))] if self._random.random() < 0.05 else few

    def _values(self, count: int) -> list[float]:
        return [self._random.choice(VALUES) for _ in range(count)]


SEEDS = [pytest.param(seed, marks=pytest.mark.slow if seed > 1 else ()) for seed in range(6)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> EverySource:
    return EverySource(tmp_path_factory.mktemp("sources"))


def core_of(seed: int) -> Callable[[], DrafterCore]:
    return lambda: DrafterCore(WildSource(seed), GROWTH, (0,), "wild")


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("seed", SEEDS)
def test_draft_source_with_random_output_is_lossless(sources: EverySource, seed: int, mode: str) -> None:
    target = sources.of("ngram")
    target.drafts = [RigDraft(target.hello, core_of(seed))]
    assert sources.check("ngram", Case(mode, 4, 12, slots=100 if seed % 2 else 4000), count=4).drafted > 0
