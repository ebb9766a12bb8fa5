"""The drafter's core: messages in, growth out."""

import math
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from ssd_serve.cache.expansions import unpack
from ssd_serve.cache.replica import Replica
from ssd_serve.cache.vectors import as_bytes
from ssd_serve.drafter.build import CoreParts, build_core
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.sources.contract import Branch, Candidates, Guesses, NodeRequest, Subtree
from ssd_serve.drafter.sources.whole_model import DraftModel
from ssd_serve.drafter.width import LiveWidth
from ssd_serve.messages import (
    Close,
    DrafterMessage,
    Features,
    Growth,
    Open,
    Outcome,
    Pause,
    Resync,
    SamplingParameters,
)
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.seeds import mix, root_name
from tests.fakes import EOS, VOCABULARY, FakeModel, ScriptedSource, core_of

LIMITS = GrowthLimits(width=3, fan_out=3, depth=6, nodes=200)
PROMPT = (5, 6, 7)
ROOT = root_name(1, 1, 2)


def make(limits: GrowthLimits = LIMITS) -> tuple[DrafterCore, ScriptedSource]:
    source = ScriptedSource()
    return core_of(source, limits), source


def opening(request: int = 1, epoch: int = 1, output: tuple[int, ...] = (), max_tokens: int = 100) -> Open:
    root = root_name(request, epoch, len(PROMPT) + len(output) - 1)
    return Open(request, epoch, PROMPT, output, SamplingParameters(max_tokens=max_tokens), 9, root)


def outcome(*tokens: int, position: int = 3, root: int = ROOT, epoch: int = 1) -> Outcome:
    for token in tokens:
        root = mix(root, token)
    return Outcome(1, epoch, position, tokens, root)


def test_it_publishes_what_it_grows_in_sequence() -> None:
    core, source = make()
    assert core.step() == []
    assert core.handle(opening()) == []
    growth = [message for _ in range(4) for message in core.step()]
    assert [message.sequence for message in growth] == [0, 1, 2, 3]
    assert {(message.request, message.epoch, message.source) for message in growth} == {(1, 1, "d0")}
    assert core.nodes == 3 * len(source.made) == 3 * (1 + 3 + 3 + 3)


def test_it_expands_the_most_probable_nodes_of_all_requests() -> None:
    core, source = make()
    for request in range(1, 4):
        core.handle(opening(request))
    assert {message.request for message in core.step()} == {1, 2, 3}
    assert len(source.made) == 3  # three roots are more probable than any guess
    core.step()
    assert len(source.made) == 6


class SlowCore(DrafterCore):
    """Picks in the obvious way: it looks at the best node of every request before each pick."""

    def _pick(self) -> list[NodeRequest]:
        picked: list[NodeRequest] = []
        while self._requests and len(picked) < self._limits.width:
            best = max(self._requests, key=lambda request: self._requests[request].reach())
            if self._requests[best].reach() == -math.inf:
                break
            picked.append(NodeRequest(best, self._requests[best].frontier.pop()))
        return picked


class CoarseSource(ScriptedSource):
    """Few different log-probabilities, so that nodes of different requests are often equally probable.
    Remembers every pick in order."""

    def __init__(self) -> None:
        super().__init__()
        self.picks: list[tuple[int, int]] = []

    def expand(self, picks: Sequence[NodeRequest], scales: Sequence[float]) -> Sequence[Candidates | None]:
        self.picks += [(pick.request, pick.node) for pick in picks]
        found: list[Candidates | None] = []
        for pick in picks:
            steps = sorted((-0.5 * (1 + (pick.node >> 8 * rank) % 3) for rank in range(3)), reverse=True)
            values = np.array(steps, dtype=np.float32)
            found.append(
                Candidates(np.array(self.tokens_of(pick.node), dtype=np.int32), values, values, -1.0)
            )
        return found


@given(st.permutations(range(1, 6)), st.integers(1, 9), st.lists(st.integers(0, VOCABULARY - 1), max_size=12))
@settings(max_examples=60, deadline=None)
def test_it_picks_what_looking_at_every_request_before_each_pick_gives(
    numbers: list[int], width: int, tokens: list[int]
) -> None:
    """Between steps roots move, requests end and begin again, and some pause."""
    limits = GrowthLimits(width=width, fan_out=3, depth=5, nodes=60)
    sources = CoarseSource(), CoarseSource()
    cores = core_of(sources[0], limits, ()), SlowCore(sources[1], limits, frozenset(), "slow")
    roots = {number: root_name(number, 1, 2) for number in numbers}
    positions = dict.fromkeys(numbers, 3)

    def tell(message: DrafterMessage) -> None:
        for core in cores:
            core.handle(message)

    for number in numbers:
        tell(opening(number))
    for turn, token in enumerate([*tokens, 0]):
        for core in cores:
            core.step()
        assert sources[0].picks == sources[1].picks
        number = numbers[turn % len(numbers)]
        if turn % 4 == 3:
            tell(Close(number, 1))
            tell(opening(number))
            roots[number], positions[number] = root_name(number, 1, 2), 3
        elif turn % 4 == 2:
            tell(Pause(paused=token % 2 == 0))
        else:
            if token % 2:  # a hit
                token = ScriptedSource.tokens_of(roots[number])[token % 3]
            roots[number] = mix(roots[number], token)
            tell(Outcome(number, 1, positions[number], (token,), roots[number]))
            positions[number] += 1
    assert sources[0].picks


class SourceOfArrays(CoarseSource):
    """The same guesses in arrays."""

    def expand(self, picks: Sequence[NodeRequest], scales: Sequence[float]) -> Sequence[Candidates | None]:
        found = [each for each in super().expand(picks, scales) if each is not None]
        columns = (np.array([getattr(each, name) for each in found]) for name in Candidates._fields)
        return Guesses(*columns)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(1, 9), st.sampled_from([20, 35, 200]))
@settings(max_examples=40, deadline=None)
def test_guesses_in_arrays_grow_the_same_trees_and_messages(ranks: list[int], width: int, nodes: int) -> None:
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
    """Of some candidates the log-probabilities are no numbers, or of all."""

    kind = "candidates"
    values = np.array([-0.5, -math.inf, math.nan], dtype=np.float32)

    def expand(self, picks: Sequence[NodeRequest], scales: Sequence[float]) -> Any:
        tokens = np.array([4, 5, 6], dtype=np.int32)
        if self.kind == "subtree":
            branches = [Branch((), tokens.tolist(), self.values.tolist())]
            return [Subtree(branches)] * len(picks)
        if self.kind == "candidates":
            return [Candidates(tokens, self.values, self.values, 0.0)] * len(picks)
        rows, values = np.tile(tokens, (len(picks), 1)), np.tile(self.values, (len(picks), 1))
        return Guesses(rows, values, values, np.zeros(len(picks), dtype=np.float32))


@pytest.mark.parametrize("kind", ["candidates", "arrays", "subtree"])
def test_candidates_whose_log_probabilities_are_no_numbers_are_left_out(kind: str) -> None:
    source = BrokenSource()
    source.kind = kind
    core = core_of(source, LIMITS, ())
    core.handle(opening())
    (growth,) = core.step()
    (expansion,) = unpack(growth, VOCABULARY) or []
    assert expansion.read() == ((4,), (-0.5,))
    source.values = np.full(3, math.nan, dtype=np.float32)
    assert core.step() == []


class Watched(LiveWidth):
    """Counts what it learns from."""

    learnt = 0

    def observe(self, nodes: int, seconds: float) -> None:
        self.learnt += 1


def test_a_step_that_was_recorded_first_teaches_nothing_about_time() -> None:
    source, widths = ScriptedSource(), Watched({1: 0.1, 3: 0.1})
    core = build_core(CoreParts(guesses=source, limits=LIMITS, ends=(EOS,), name="d0", widths=widths))
    core.handle(opening())
    source.exceptional_step = True
    core.step()
    assert (core.exceptional_step, widths.learnt) == (True, 0)
    source.exceptional_step = False
    core.step()
    assert (core.exceptional_step, widths.learnt) == (False, 1)


def test_an_outcome_of_the_wrong_position_asks_for_a_new_beginning() -> None:
    core, source = make()
    core.handle(opening())
    core.step()
    assert core.handle(outcome(4, position=5)) == [Resync(1, 1)]
    assert source.committed[1] == [*PROMPT]


def test_an_outcome_heard_twice_changes_nothing() -> None:
    core, source = make()
    core.handle(opening())
    assert core.handle(outcome(4)) == []
    assert core.handle(outcome(4)) == []
    assert source.committed[1] == [*PROMPT, 4]


def test_a_different_root_is_a_gap_and_nothing_grows_below_it() -> None:
    core, source = make()
    core.handle(opening())
    core.step()
    assert core.handle(Outcome(1, 1, 3, (4,), root=12345)) == [Resync(1, 1)]
    assert core.step() == []
    assert source.committed == {}
    assert core.handle(outcome(8, position=4)) == [Resync(1, 1)]
    core.handle(opening(epoch=2, output=(4, 8)))
    assert source.committed[1] == [*PROMPT, 4, 8]


def test_an_unknown_request_asks_for_its_beginning() -> None:
    core, _ = make()
    assert core.handle(outcome(4)) == [Resync(1, 1)]
    core.handle(opening(epoch=1))
    assert core.handle(outcome(4, epoch=2)) == [Resync(1, 2)]


def test_messages_of_older_epochs_are_dropped() -> None:
    core, source = make()
    core.handle(opening(epoch=3, output=(4,)))
    for stale in (opening(epoch=2), outcome(4, epoch=2), Close(1, 2), Resync(1, 2)):
        assert core.handle(stale) == []
    assert source.committed[1] == [*PROMPT, 4]
    assert len(core.requests) == 1
    core.handle(Close(1, 3))
    assert len(core.requests) == 0
    assert source.committed == {}


def test_a_new_epoch_begins_at_sequence_0_with_an_empty_tree() -> None:
    core, _ = make()
    core.handle(opening())
    core.step()
    core.handle(opening(epoch=2, output=(4,)))
    assert core.nodes == 0
    assert [(message.epoch, message.sequence) for message in core.step()] == [(2, 0)]


def test_a_snapshot_holds_the_whole_tree() -> None:
    core, source = make()
    core.handle(opening())
    for _ in range(5):
        core.step()
    root = Replica(1, 1, ROOT, 200, VOCABULARY)
    (snapshot,) = core.handle(Resync(1, 1))
    assert isinstance(snapshot, Growth)
    assert snapshot.snapshot
    assert root.apply(snapshot)
    assert {node.name: node.tokens for node in root.tree.expanded()} == source.made


def test_below_a_hit_the_tree_lives_on_and_after_a_miss_it_begins_again() -> None:
    core, source = make()
    core.handle(opening())
    for _ in range(4):
        core.step()
    hit, miss = source.made[ROOT][0], (source.made[ROOT][0] + 1) % VOCABULARY
    before = core.nodes
    core.handle(outcome(hit))
    assert 0 < core.nodes < before
    core.handle(outcome(miss, position=4, root=mix(ROOT, hit)))
    assert core.nodes == 0
    assert len(core.step()) == 1


class ReadingSource(ScriptedSource):
    """It guesses nothing before it has read what the target has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.has_read = False

    def read(self, request: int, position: int, features: torch.Tensor) -> None:
        self.has_read = True

    def expand(self, picks: Sequence[NodeRequest], scales: Sequence[float]) -> Sequence[Candidates | None]:
        return super().expand(picks, scales) if self.has_read else [None] * len(picks)


FEATURES = Features(1, 1, 0, 2, as_bytes(torch.zeros((3, 2))))


def test_a_root_is_read_once_its_features_have_come() -> None:
    source = ReadingSource()
    core = core_of(source, LIMITS)
    core.handle(opening())
    assert not grown(core)
    core.handle(FEATURES)
    assert grown(core)


def test_who_reads_features_guesses_anew_below_every_new_root() -> None:
    source = ReadingSource()
    core = core_of(source, LIMITS)
    for message in (opening(), FEATURES):
        core.handle(message)
    grown(core)
    root = mix(ROOT, source.made[ROOT][0])
    below = mix(root, source.made[root][0])
    assert below in source.made
    core.handle(outcome(source.made[ROOT][0]))
    assert core.nodes == 0
    source.made.clear()
    grown(core)
    assert list(source.made)[:2] == [root, below]


def grown(core: DrafterCore) -> list[DrafterMessage]:
    found: list[DrafterMessage] = []
    while growth := core.step():
        found.extend(growth)
    return found


def test_it_stops_when_nothing_is_worth_it() -> None:
    core, _ = make()
    core.handle(opening())
    assert grown(core)
    assert core.step() == []
    assert core.nodes <= LIMITS.nodes


def test_nothing_grows_beyond_the_last_token() -> None:
    for tokens, expansions in ((1, 0), (2, 1), (3, 4)):
        core, source = make()
        core.handle(opening(max_tokens=tokens))
        grown(core)
        assert len(source.made) == expansions


def test_what_was_put_out_before_counts_towards_the_last_token() -> None:
    core, source = make()
    core.handle(opening(output=(4, 8), max_tokens=4))
    grown(core)
    assert len(source.made) == 1


def test_nothing_grows_below_ends() -> None:
    for stops, ignore_eos, expansions in (((), True, 3), ((), False, 2), ((7, 14), True, 1)):
        core, source = make()
        source.candidates = [EOS, 7, 14]
        parameters = SamplingParameters(max_tokens=3, stop_token_ids=stops, ignore_eos=ignore_eos)
        core.handle(Open(1, 1, PROMPT, (), parameters, 9, ROOT))
        grown(core)
        assert len(source.made) == 1 + expansions


def test_nothing_grows_beyond_what_the_draft_model_has_positions_for() -> None:
    for context, expansions in ((2, 0), (3, 1), (4, 4)):
        core, source = make(GrowthLimits(width=3, fan_out=3, depth=6, nodes=200, context=context))
        core.handle(opening())
        grown(core)
        assert len(source.made) == expansions


def test_a_long_text_is_read_step_by_step_while_others_grow() -> None:
    source = DraftModel(FakeModel(300), 300, NoiseRows(VOCABULARY, 64), text_rows=20)
    core = core_of(source, LIMITS)
    core.handle(opening(1))
    core.step()
    core.handle(Open(2, 1, tuple([5] * 70), (), SamplingParameters(max_tokens=100), 9, root_name(2, 1, 69)))
    for _ in range(3):
        assert [growth.request for growth in core.step()] == [1]
        assert core.reading
    assert {growth.request for growth in core.step()} == {1, 2}
    assert not core.reading


def test_where_the_target_has_its_core_a_paused_drafter_reads_nothing_until_it_goes_on() -> None:
    core, source = make(GrowthLimits(width=3, fan_out=3, depth=6, nodes=200, reads_paused=False))
    core.handle(Pause(paused=True))
    core.handle(opening())
    assert not core.step()
    assert not source.made
    core.handle(Pause(paused=False))
    assert core.step()


def test_paused_it_only_reads_what_was_committed() -> None:
    core, source = make()
    core.handle(opening())
    core.handle(Pause(paused=True))
    grown(core)
    assert len(source.made) == 1
    core.handle(Pause(paused=False))
    assert core.step()
