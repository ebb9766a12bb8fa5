"""The order and the limits of growth in the drafter's core."""

import math
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from ssd_serve.base.draft_messages import (
    Close,
    DrafterMessage,
    Open,
    Outcome,
    Pause,
    Resync,
)
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.base.seeds import mix, root_name
from ssd_serve.cache.expansions import unpack
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.sources.contract import (
    Branch,
    CandidateBatch,
    Candidates,
    NodeRequest,
    Scales,
    Subtree,
)
from ssd_serve.drafter.sources.registry import SourceDescription
from tests.drafter.core_factory import LIMITS, PROMPT, ROOT, grown, make, opening, outcome
from tests.fakes import EOS, VOCABULARY, ScriptedSource, core_of


class SlowCore(DrafterCore):
    """The reference of `_pick`: compares the best nodes of all requests before each pick."""

    def _pick(self, width: int) -> list[NodeRequest]:
        picked: list[NodeRequest] = []
        while self._requests and len(picked) < width:
            best = max(self._requests, key=lambda request: self._requests[request].reach())
            if self._requests[best].reach() == -math.inf:
                break
            picked.append(NodeRequest(best, self._requests[best].frontier.take(1, -math.inf)[0]))
        return picked


class CoarseSource(ScriptedSource):
    """Few different log-probabilities, so that nodes of different requests are often equally probable.
    Remembers every pick in order."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[int, int]] = []

    def expand(
        self, requests: Sequence[NodeRequest], scales: Sequence[Scales]
    ) -> Sequence[Candidates | None]:
        self.requests += [(pick.request, pick.node) for pick in requests]
        found: list[Candidates | None] = []
        for pick in requests:
            steps = sorted((-0.5 * (1 + (pick.node >> 8 * rank) % 3) for rank in range(3)), reverse=True)
            values = np.array(steps, dtype=np.float32)
            found.append(
                Candidates(np.array(self.tokens_of(pick.node), dtype=np.int32), values, values, -1.0)
            )
        return found


@given(st.permutations(range(1, 6)), st.integers(1, 9), st.lists(st.integers(0, VOCABULARY - 1), max_size=12))
@settings(max_examples=60, deadline=None)
def test_best_first_order_over_requests_equals_the_reference(
    numbers: list[int], width: int, tokens: list[int]
) -> None:
    """Between steps roots move, requests end and begin again, and some pause."""
    limits = GrowthLimits(width=width, fan_out=3, depth=5, nodes=60)
    sources = CoarseSource(), CoarseSource()
    cores = core_of(sources[0], limits, ()), SlowCore(sources[1], limits, frozenset(), "slow")
    roots = {number: root_name(number, 1, 2) for number in numbers}
    positions = dict.fromkeys(numbers, 3)

    def send(message: DrafterMessage) -> None:
        for core in cores:
            core.handle(message)

    for number in numbers:
        send(opening(number))
    for turn, token in enumerate([*tokens, 0]):
        for core in cores:
            core.step()
        assert sources[0].requests == sources[1].requests
        number = numbers[turn % len(numbers)]
        if turn % 4 == 3:
            send(Close(number, 1))
            send(opening(number))
            roots[number], positions[number] = root_name(number, 1, 2), 3
        elif turn % 4 == 2:
            send(Pause(paused=token % 2 == 0))
        else:
            if token % 2:  # a hit
                token = ScriptedSource.tokens_of(roots[number])[token % 3]
            roots[number] = mix(roots[number], token)
            send(Outcome(number, 1, positions[number], (token,), roots[number]))
            positions[number] += 1
    assert sources[0].requests


class SourceOfArrays(CoarseSource):
    """The same guesses in arrays."""

    def expand(
        self, requests: Sequence[NodeRequest], scales: Sequence[Scales]
    ) -> Sequence[Candidates | None]:
        found = [each for each in super().expand(requests, scales) if each is not None]
        columns = (np.array([getattr(each, name) for each in found]) for name in Candidates._fields)
        return CandidateBatch(*columns)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(1, 9), st.sampled_from([20, 35, 200]))
@settings(max_examples=40, deadline=None)
def test_candidate_batches_grow_the_same_trees_and_messages(ranks: list[int], width: int, nodes: int) -> None:
    """Trees may be full before all of a step is appended."""
    limits = GrowthLimits(width=width, fan_out=3, depth=5, nodes=nodes)
    cores = core_of(CoarseSource(), limits, ()), core_of(SourceOfArrays(), limits, ())
    for core in cores:
        for request in (1, 2):
            core.handle(opening(request))
    root, position = ROOT, 3
    for rank in ranks:
        for _ in range(3):
            each, together = (core.step() for core in cores)
            assert each == together
        token = ScriptedSource.tokens_of(root)[rank]
        root = mix(root, token)
        for core in cores:
            assert core.handle(Outcome(1, 1, position, (token,), root)) == []
        position += 1
    assert cores[0].handle(Resync(1, 1)) == cores[1].handle(Resync(1, 1))


class BrokenSource(ScriptedSource):
    kind = "candidates"
    values = np.array([-0.5, -math.inf, math.nan], dtype=np.float32)

    def expand(self, requests: Sequence[NodeRequest], scales: Sequence[Scales]) -> Any:
        tokens = np.array([4, 5, 6], dtype=np.int32)
        if self.kind == "subtree":
            branches = [Branch((), tokens.tolist(), self.values.tolist())]
            return [Subtree(branches)] * len(requests)
        if self.kind == "candidates":
            return [Candidates(tokens, self.values, self.values, 0.0)] * len(requests)
        rows, values = np.tile(tokens, (len(requests), 1)), np.tile(self.values, (len(requests), 1))
        return CandidateBatch(rows, values, values, np.zeros(len(requests), dtype=np.float32))


@pytest.mark.parametrize("kind", ["candidates", "arrays", "subtree"])
def test_candidates_with_nonfinite_log_probabilities_are_dropped(kind: str) -> None:
    source = BrokenSource()
    source.kind = kind
    core = core_of(source, LIMITS, ())
    core.handle(opening())
    (growth,) = core.step()
    (expansion,) = unpack(growth, VOCABULARY) or []
    assert expansion.read() == ((4,), (-0.5,))
    source.values = np.full(3, math.nan, dtype=np.float32)
    assert core.step() == []


@pytest.mark.parametrize(
    ("output", "max_tokens", "context", "expansions"),
    [
        ((), 1, 99, 0),
        ((), 2, 99, 1),
        ((), 3, 99, 4),
        ((4, 8), 4, 99, 1),
        ((), 100, 2, 0),
        ((), 100, 3, 1),
        ((), 100, 4, 4),
    ],
)
def test_nothing_grows_beyond_max_tokens_and_context(
    output: tuple[int, ...], max_tokens: int, context: int, expansions: int
) -> None:
    core, source = make(GrowthLimits(width=3, fan_out=3, depth=6, nodes=200, context=context))
    core.handle(opening(output=output, max_tokens=max_tokens))
    grown(core)
    assert len(source.made) == expansions
    assert core.step() == []


def test_nothing_grows_below_eos_and_stop_ids() -> None:
    for stops, ignore_eos, expansions in (((), True, 3), ((), False, 2), ((7, 14), True, 1)):
        core, source = make()
        source.candidates = [EOS, 7, 14]
        parameters = SamplingParameters(max_tokens=3, stop_token_ids=stops, ignore_eos=ignore_eos)
        core.handle(Open(1, 1, PROMPT, (), parameters, 9, ROOT))
        grown(core)
        assert len(source.made) == 1 + expansions


class BlockSource(ScriptedSource):
    """Drafts a chain of three tokens below a node, with two candidates each; records requests and scales."""

    def __init__(self) -> None:
        super().__init__()
        self.requested: list[NodeRequest] = []
        self.scales: list[list[float]] = []

    def expand(self, requests: Sequence[NodeRequest], scales: Sequence[Scales]) -> Any:
        self.requested += requests
        self.scales += map(list, scales)
        branches = [
            Branch((6,) * level, [6, 7], [-0.2, -2.0], scores=[3.0, 1.0], expected_score=2.5)
            for level in range(3)
        ]
        return [Subtree(branches)] * len(requests)


def block_core(source: BlockSource, calibrated: bool = True) -> DrafterCore:
    core = DrafterCore(
        source, LIMITS, (EOS,), "d0", description=SourceDescription(block=3, calibrated=calibrated)
    )
    core.handle(opening(max_tokens=10_000))
    return core


def test_a_block_source_is_never_asked_to_expand_leaves() -> None:
    source = BlockSource()
    core = block_core(source)
    assert len(grown(core)) == 1
    assert core.step() == []
    root = ROOT
    for position, token in enumerate([6, 6, 6, 9, 6], 3):
        root = mix(root, token)
        core.handle(Outcome(1, 1, position, (token,), root))
        grown(core)
    assert len(source.requested) == 3, "the first root, the root after the block, and the root after a miss"
    assert all(each.at.parent is None for each in source.requested)


def test_a_subtree_with_scores_is_calibrated_at_each_depth() -> None:
    scales: dict[bool, list[list[float]]] = {}
    for calibrated in (True, False):
        source = BlockSource()
        core = block_core(source, calibrated)
        position, root = 3, ROOT
        for _ in range(100):
            grown(core)
            core.handle(Outcome(1, 1, position, (6, 6, 9), root := mix(mix(mix(root, 6), 6), 9)))
            position += 3
        scales[calibrated] = source.scales
    first, last = scales[True][0], scales[True][-1]
    assert len(first) > 3
    assert last[0] < first[0], "the first choice is right more often than its probability says"
    assert last[2] > first[2], "the third choice is never a candidate"
    assert scales[False] == [[1.0]] * 100


class ScaleRecorder(ScriptedSource):
    def __init__(self) -> None:
        super().__init__()
        self.scales: list[Scales] = []

    def expand(self, requests: Sequence[NodeRequest], scales: Sequence[Scales]) -> Any:
        self.scales += scales
        return super().expand(requests, scales)


def test_outcomes_calibrate_the_scale_of_the_next_step() -> None:
    source = ScaleRecorder()
    core = core_of(source, LIMITS)
    core.handle(opening())
    core.step()
    token = source.made[ROOT][0]
    core.handle(outcome(token))
    core.step()
    assert source.scales[-1] != source.scales[0]


class UnevenSource(ScriptedSource):
    """The candidates of request 2 are the most probable ones."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] = []

    def expand(self, requests: Sequence[NodeRequest], scales: Sequence[Scales]) -> Any:
        self.order += [each.request for each in requests]
        tokens, values = np.array([4, 5, 6], dtype=np.int32), np.array([-0.1, -0.2, -0.3], dtype=np.float32)
        return [Candidates(tokens, values - 2 * (each.request == 1), values, 0.0) for each in requests]


def test_the_more_probable_request_is_expanded_first() -> None:
    source = UnevenSource()
    core = core_of(source, LIMITS)
    for request in (1, 2):
        core.handle(opening(request))
    core.step()
    core.step()
    assert source.order == [1, 2, 2, 2, 2]
