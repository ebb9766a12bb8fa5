"""The drafter's core: messages in, growth out."""

from collections.abc import Sequence

import torch

from ssd_serve.base.draft_messages import (
    Close,
    Features,
    Growth,
    Open,
    Outcome,
    Pause,
    Resync,
)
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.base.seeds import mix, root_name
from ssd_serve.cache.replica import Replica
from ssd_serve.cache.vectors import as_bytes
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.sources.contract import Candidates, NodeRequest, Scales
from ssd_serve.drafter.sources.registry import SourceDescription
from ssd_serve.drafter.sources.whole_model import DraftModel
from ssd_serve.drafter.step_time import LiveWidth
from ssd_serve.sampling.noise_rows import NoiseRows
from tests.drafter.core_factory import LIMITS, PROMPT, ROOT, grown, make, opening, outcome
from tests.fakes import EOS, VOCABULARY, FakeModel, ScriptedSource, core_of


def test_growth_messages_are_numbered_in_sequence() -> None:
    core, source = make()
    assert core.step() == []
    assert core.handle(opening()) == []
    growth = [message for _ in range(4) for message in core.step()]
    assert [message.sequence for message in growth] == [0, 1, 2, 3]
    assert {(message.request, message.epoch, message.source) for message in growth} == {(1, 1, "d0")}
    assert core.nodes == 3 * len(source.made) == 3 * (1 + 3 + 3 + 3)


class Watched(LiveWidth):
    """Counts what it learns from."""

    learnt = 0

    def observe(self, nodes: int, seconds: float) -> None:
        self.learnt += 1


def test_warmup_steps_do_not_count_in_the_width() -> None:
    source, widths = ScriptedSource(), Watched({1: 0.1, 3: 0.1})
    core = DrafterCore(source, LIMITS, (EOS,), "d0", widths=widths)
    core.handle(opening())
    source.is_warmup_step = True
    core.step()
    assert (core.is_warmup_step, widths.learnt) == (True, 0)
    source.is_warmup_step = False
    core.step()
    assert (core.is_warmup_step, widths.learnt) == (False, 1)


def test_an_outcome_at_the_wrong_position_requests_a_resync() -> None:
    core, source = make()
    core.handle(opening())
    core.step()
    assert core.handle(outcome(4, position=5)) == [Resync(1, 1)]
    assert source.committed[1] == [*PROMPT]


def test_a_duplicate_outcome_changes_nothing() -> None:
    core, source = make()
    core.handle(opening())
    assert core.handle(outcome(4)) == []
    assert core.handle(outcome(4)) == []
    assert source.committed[1] == [*PROMPT, 4]


def test_a_different_root_requests_a_resync_and_stops_growth() -> None:
    core, source = make()
    core.handle(opening())
    core.step()
    assert core.handle(Outcome(1, 1, 3, (4,), root=12345)) == [Resync(1, 1)]
    assert core.step() == []
    assert source.committed == {}
    assert core.handle(outcome(8, position=4)) == [Resync(1, 1)]
    core.handle(opening(epoch=2, output=(4, 8)))
    assert source.committed[1] == [*PROMPT, 4, 8]


def test_an_unknown_request_requests_a_resync() -> None:
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


def test_a_new_epoch_starts_at_sequence_0_with_an_empty_tree() -> None:
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


def test_a_hit_keeps_the_tree_and_a_miss_drops_it() -> None:
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
    def __init__(self) -> None:
        super().__init__()
        self.has_read = False

    def read(self, request: int, position: int, features: torch.Tensor) -> None:
        self.has_read = True

    def expand(
        self, requests: Sequence[NodeRequest], scales: Sequence[Scales]
    ) -> Sequence[Candidates | None]:
        return super().expand(requests, scales) if self.has_read else [None] * len(requests)


FEATURES = Features(1, 1, 0, 2, as_bytes(torch.zeros((3, 2))))


def test_a_root_is_expanded_once_its_features_arrive() -> None:
    source = ReadingSource()
    core = core_of(source, LIMITS)
    core.handle(opening())
    assert not grown(core)
    core.handle(FEATURES)
    assert grown(core)


def test_a_source_that_does_not_keep_its_tree_drafts_again_below_every_root() -> None:
    source = ReadingSource()
    core = DrafterCore(source, LIMITS, (EOS,), "d0", description=SourceDescription(keeps_tree=False))
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


def test_a_long_prefill_does_not_stop_other_requests() -> None:
    source = DraftModel(FakeModel(300), 300, NoiseRows(VOCABULARY, 64), prefill_rows=20)
    core = core_of(source, LIMITS)
    core.handle(opening(1))
    core.step()
    core.handle(Open(2, 1, tuple([5] * 70), (), SamplingParameters(max_tokens=100), 9, root_name(2, 1, 69)))
    for _ in range(3):
        assert [growth.request for growth in core.step()] == [1]
        assert core.prefilling
    assert {growth.request for growth in core.step()} == {1, 2}
    assert not core.prefilling


def test_pause_stops_prefills_if_configured() -> None:
    core, source = make(GrowthLimits(width=3, fan_out=3, depth=6, nodes=200, prefills_paused=False))
    core.handle(Pause(paused=True))
    core.handle(opening())
    assert not core.step()
    assert not source.made
    core.handle(Pause(paused=False))
    assert core.step()


def test_a_paused_request_expands_its_root_only() -> None:
    core, source = make()
    core.handle(opening())
    core.handle(Pause(paused=True))
    grown(core)
    assert len(source.made) == 1
    core.handle(Pause(paused=False))
    assert core.step()
