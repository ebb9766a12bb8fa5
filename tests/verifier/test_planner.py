"""Tests of the round planner: prefill chunk sizes, modes and cores, and what the mode controller learns."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from ssd_serve.base.cost import CostTable, HostCost, Reading, Timing
from ssd_serve.base.draft_messages import Hello
from ssd_serve.base.messages import FixedShape
from ssd_serve.bench.memory_channel import memory_pair
from ssd_serve.verifier.control.mode_controller import ModeController, RunningTexts
from ssd_serve.verifier.control.planner import (
    DraftBounds,
    ModeConfig,
    Round,
    RoundPlanner,
    cheapest_chunk,
    fixed_shapes,
)
from ssd_serve.verifier.control.wait import WaitPolicy
from ssd_serve.verifier.drafters.pool import DrafterPool, SpeculationMode
from ssd_serve.verifier.scheduler import ScheduledChunk
from tests.fakes import HELLO, StillCores
from tests.verifier.scheduler_factory import make_request


def planner(max_tpot_s: float) -> RoundPlanner:
    cost = CostTable([Timing(rows, 0, 0.001 * rows) for rows in (1, 64)])
    bounds = DraftBounds(4096, None, 8, max_tpot_s)
    return RoundPlanner(DrafterPool(HELLO), cost, WaitPolicy(), bounds, HostCost(node_s=0.0))


def test_cheapest_chunk_prefills_fastest() -> None:
    flat = np.full(513, 0.01)  # a memory-bound GPU: more rows cost nothing
    rows = np.arange(513, dtype=np.float64)
    straight = 0.01 + 1e-4 * rows
    assert cheapest_chunk(flat) == cheapest_chunk(straight) == 512
    cliff = straight + 5e-4 * np.maximum(0.0, rows - 128)  # rows beyond a cache size cost more
    assert 128 <= cheapest_chunk(cliff) <= 140
    overhead = 0.02 + 1e-3 * rows + 2e-4 * np.maximum(0.0, rows - 16)  # the first 16 rows are cheaper
    assert cheapest_chunk(overhead) == 512  # but rounds of 16 rows add overhead
    gentle = straight + 1e-5 * np.maximum(0.0, rows - 128)  # a difference within noise
    assert cheapest_chunk(gentle) == 512
    assert cheapest_chunk(cliff[:9]) == 8


def test_prefill_chunk_keeps_the_target_for_time_per_token() -> None:
    assert planner(math.inf).prefill_tokens(8, 512) == 512
    assert planner(0.010).prefill_tokens(0, 512) == 512
    assert planner(0.1005).prefill_tokens(8, 512) == 92
    assert planner(1e-6).prefill_tokens(8, 512) == 16
    assert planner(1e-6).prefill_tokens(8, 5) == 5


def test_price_of_a_node_is_the_time_of_its_row_at_the_present_rate() -> None:
    planned = planner(math.inf)
    assert planned.node_price() == 0.0
    planned.observe(Round(1, 0, 0, 1, Reading(), 1, 0, 0.001, 0.009, 0.010))
    assert planned.node_price() == pytest.approx(100 * 0.001, rel=0.2)
    planned.observe(Round(8, 0, 0, 8, Reading(), 8, 0, 0.008, 0.002, 0.010))
    assert planned.node_price() > 0.5
    planned.bounds = DraftBounds(4096, None, 8, shape=FixedShape(3))
    chunk = chunk_of(1, [1, 2], (1,))
    planned.choose([chunk.request], [chunk], lambda: None)
    assert planned.node_price() == 0.0


ASYNC, SYNC, PLAIN = SpeculationMode.ASYNC, SpeculationMode.SYNC, SpeculationMode.PLAIN
MODES = (ASYNC, SYNC, PLAIN)


class Recorder(ModeController):
    """Controller that always chooses `mode`, and records what it is asked and told."""

    def __init__(self, costs: dict[SpeculationMode, CostTable], mode: SpeculationMode) -> None:
        super().__init__(costs, HostCost())
        self.mode = mode
        self.texts: list[RunningTexts] = []
        self.observed: list[tuple[int, int, float]] = []

    def choose(self, requests: tuple[int, ...], texts: Callable[[], RunningTexts]) -> SpeculationMode:
        self.texts.append(texts())
        return self.mode

    def observe(self, requests: int, tokens: int, seconds: float) -> None:
        self.observed.append((requests, tokens, seconds))


class Harness:
    """Planner of a target that runs `faster` times as fast on all cores, with a joined drafter."""

    def __init__(self, faster: float = 1.8, mode: SpeculationMode = ASYNC, hello: Hello = HELLO) -> None:
        self.drafters = DrafterPool(HELLO)
        mine, self.drafter = memory_pair()
        self.drafters.connect(mine)
        self.drafter.send(hello)
        self.drafters.drain({})
        self.shared = CostTable([Timing(1, 0, 0.01), Timing(64, 0, 0.1)])
        self.whole = CostTable([Timing(1, 0, 0.01 / faster), Timing(64, 0, 0.1 / faster)])
        costs = {each: self.shared if each is ASYNC else self.whole for each in MODES}
        self.controller, self.cores = Recorder(costs, mode), StillCores()
        config = ModeConfig(self.controller, self.cores, {each: WaitPolicy() for each in MODES})
        self.planner = RoundPlanner(
            self.drafters, self.shared, WaitPolicy(), DraftBounds(4096, None, 8), mode_config=config
        )

    def round(self, decoding: int, prompt: int = 0) -> SpeculationMode:
        """Plan a round of some decoding requests and of a prompt; return the mode in which it computes."""
        chunks = [chunk_of(number, [1, 2], (1,)) for number in range(decoding)]
        if prompt:
            chunks.append(chunk_of(99, list(range(prompt)), tuple(range(prompt))))
        self.planner.choose([each.request for each in chunks], chunks, lambda: None)
        return self.cores.entered[-1]


def chunk_of(number: int, prompt: list[int], slots: tuple[int, ...]) -> ScheduledChunk:
    request = make_request(number, prompt, 8)
    request.slots.extend(range(len(prompt) - len(slots)))
    return ScheduledChunk(request, slots, final=True)


def test_prefill_runs_on_all_cores_and_pauses_the_drafter() -> None:
    harness = Harness(1.8)
    assert harness.round(1) is ASYNC
    assert harness.drafters.working
    assert harness.round(1, prompt=63) is PLAIN
    assert harness.planner.prefilling_alone
    assert harness.planner.cost is harness.whole
    assert not harness.drafters.working
    assert harness.planner.mode is ASYNC
    assert harness.round(1) is ASYNC
    assert not harness.planner.prefilling_alone
    assert harness.planner.cost is harness.shared
    assert harness.drafters.working


def test_rounds_without_gain_by_all_cores_keep_the_drafters_core() -> None:
    assert Harness(1.8).round(32) is ASYNC
    harness = Harness(1.05)
    assert harness.round(0, prompt=64) is ASYNC
    assert not harness.planner.prefilling_alone


def test_controller_observes_decode_rounds_without_tokens_of_lookups() -> None:
    harness = Harness()
    harness.round(2)
    harness.planner.observe(Round(2, 0, 0, 6, Reading(), 6, 1, 0.007, 0.001, 0.008))
    harness.planner.observe(Round(2, 1, 30, 36, Reading(), 5, 0, 0.04, 0.01, 0.05))
    assert harness.controller.observed == [(2, 5, 0.008)]


def test_controller_is_told_about_the_running_texts() -> None:
    harness = Harness(hello=replace(HELLO, prefill_ms=1.0, step_ms=2.0))
    harness.round(2)
    texts = harness.controller.texts[0]
    assert (texts.load.requests, texts.remaining_tokens) == (2, 8)
    assert 0 < texts.acceptance < texts.hopeful_acceptance < 1
    assert {mode: step.seconds for mode, step in texts.steps.items()} == {ASYNC: 0.002}
    assert texts.pending_prefill_s[SYNC] == 0.0


def test_drafter_without_a_known_step_time_is_tried() -> None:
    harness = Harness(hello=replace(HELLO, step_ms=0.0))
    harness.round(1)
    assert 0 < harness.controller.texts[0].steps[ASYNC].seconds < 0.01


def test_fixed_shape_drafts_in_the_first_mode() -> None:
    harness = Harness(mode=PLAIN)
    assert harness.round(1) is PLAIN
    harness.planner.bounds = DraftBounds(4096, None, 8, shape=FixedShape(3))
    assert harness.round(1) is ASYNC
    harness.planner.observe(Round(1, 0, 0, 4, Reading(), 2, 0, 0.01, 0.001, 0.011))
    assert not harness.controller.observed, "the round is not one of the controller's mode"


@pytest.mark.parametrize(
    ("depth", "shape", "nodes"),
    [
        (4, FixedShape(9), 4),
        (0, FixedShape(9), 9),
        (12, FixedShape(9), 9),
        (4, FixedShape(9, chain=False), 9),
    ],
)
def test_a_fixed_chain_is_no_longer_than_what_the_drafter_guesses(
    depth: int, shape: FixedShape, nodes: int
) -> None:
    harness = Harness(hello=replace(HELLO, depth=depth))
    assert harness.drafters.depth == depth
    (found,) = fixed_shapes([chunk_of(1, [1, 2], (1,))], shape, depth).values()
    assert found == replace(shape, nodes=nodes)
