"""Tests of the round planner: prefill chunk sizes, and observations for the mode controller."""

import math

import numpy as np
import pytest
from msgspec.structs import replace

from ssd_serve.base.cost import CostTable, HostCost, Reading, Timing
from ssd_serve.base.devices import Device
from ssd_serve.base.draft_messages import Hello
from ssd_serve.bench.memory_channel import memory_pair
from ssd_serve.verifier.control.budget import NoWait
from ssd_serve.verifier.control.execution import Cores, ModeConfig
from ssd_serve.verifier.control.mode_controller import ModeController
from ssd_serve.verifier.control.round_planner import DraftBounds, Round, RoundPlanner, cheapest_chunk
from ssd_serve.verifier.drafters.pool import DrafterPool, SpeculationMode
from ssd_serve.verifier.scheduler import ScheduledChunk
from tests.fakes import HELLO, StillCores
from tests.verifier.scheduler_factory import make_request


def planner(max_tpot_s: float) -> RoundPlanner:
    cost = CostTable([Timing(rows, 0, 0.001 * rows) for rows in (1, 64)])
    bounds = DraftBounds(4096, None, 8, max_tpot_s)
    return RoundPlanner(DrafterPool(HELLO), cost, NoWait(), bounds, HostCost(node_s=0.0))


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


MODES = (SpeculationMode.ASYNC, SpeculationMode.PLAIN)


class RecordingController(ModeController[SpeculationMode]):
    def __init__(self) -> None:
        super().__init__(MODES)
        self.observed: list[tuple[float, float, float, bool]] = []

    def observe(self, gained_s: float, seconds: float, plain_s: float, prefill: bool = False) -> None:
        self.observed.append((gained_s, seconds, plain_s, prefill))


def joined(hello: Hello = HELLO, synchronous: bool = False) -> DrafterPool:
    drafters = DrafterPool(HELLO)
    mine, its = memory_pair()
    drafters.connect(mine, synchronous)
    its.send(hello)
    drafters.drain({})
    return drafters


def governed(
    controller: ModeController[SpeculationMode],
    cost: CostTable,
    mode_config: ModeConfig | None = None,
    drafters: DrafterPool | None = None,
) -> RoundPlanner:
    drafters = drafters or joined()
    cores = Cores(Device("cpu"), None)
    alike = ModeConfig(controller, cores, dict.fromkeys(MODES, cost), dict.fromkeys(MODES, NoWait()))
    return RoundPlanner(
        drafters, cost, NoWait(), DraftBounds(4096, None, 8), mode_config=mode_config or alike
    )


@pytest.mark.parametrize(
    ("round_", "observed"),
    [
        # A decode round counts as the plain rounds that it saves.
        (Round(2, 0, 0, 6, Reading(), 6, 0.007, 0.001, 0.008, levels=4), (0.006, 0.008, 0.002, False)),
        # Prompt rows count as the time of plain decoding for them.
        (Round(2, 1, 30, 36, Reading(), 5, 0.04, 0.01, 0.05, levels=4), (0.035, 0.05, 0.032, True)),
        # Rounds of prompts alone show how much drafting slows prefill.
        (Round(0, 2, 60, 60, Reading(), 0, 0.07, 0.01, 0.08, levels=0), (0.06, 0.08, 0.06, True)),
    ],
)
def test_controller_observes_time_and_gain_of_a_round(
    round_: Round, observed: tuple[float, float, float, bool]
) -> None:
    controller = RecordingController()
    governed(controller, CostTable([Timing(rows, 0, 0.001 * rows) for rows in (1, 64)])).observe(round_)
    assert controller.observed == [pytest.approx(observed)]


def test_prefill_on_all_cores_counts_for_the_drafting_mode() -> None:
    controller = RecordingController()
    slow, fast = (CostTable([Timing(rows, 0, price * rows) for rows in (1, 64)]) for price in (2e-3, 1e-3))
    planner = governed(
        controller,
        slow,
        ModeConfig(
            controller,
            StillCores(),
            {SpeculationMode.ASYNC: slow, SpeculationMode.PLAIN: fast},
            dict.fromkeys(MODES, NoWait()),
            slow,
        ),
    )
    request = make_request(0, list(range(60)), 8)
    planner.choose([request], [ScheduledChunk(request, tuple(range(60)), final=True)], lambda: None)
    assert planner.execution.prefilling_alone
    assert planner.execution.mode is SpeculationMode.ASYNC
    planner.observe(
        Round(0, 1, 60, 60, Reading(), tokens=0, forward_s=0.07, host_s=0.01, total_s=0.08, levels=0)
    )
    assert controller.observed == [pytest.approx((0.06, 0.08, 0.06, True))]


def remaining_benefit(tokens: int, prompt: int = 40) -> float:
    controller = ModeController[SpeculationMode](MODES)
    drafters = joined(replace(HELLO, prefill_ms=1.0))
    planner = governed(controller, CostTable([Timing(rows, 0, 1e-3) for rows in (1, 64)]), drafters=drafters)
    request = make_request(0, list(range(prompt)), 40)
    request.tokens.extend([7] * tokens)
    request.slots.extend(range(len(request.tokens) - 1))
    chunk = ScheduledChunk(request, (len(request.tokens) - 1,), final=True)
    planner.choose([request], [chunk], lambda: None)
    drafters.set_mode(SpeculationMode.PLAIN)
    drafters.open(request)
    assert controller.remaining_benefit(SpeculationMode.PLAIN) == 1.0
    return controller.remaining_benefit(SpeculationMode.ASYNC)


def test_remaining_benefit_falls_towards_the_end_of_a_request() -> None:
    assert remaining_benefit(20) == pytest.approx((20 / (20 + 60)) / (40 / (40 + 40)))
    assert remaining_benefit(40) == 0.0


@pytest.mark.parametrize(("running", "slower"), [(1, 0.0), (4, 0.15)])
def test_forecast_prefill_slowdown_of_a_synchronous_drafter(running: int, slower: float) -> None:
    cost = CostTable([Timing(rows, 0, 1e-3 * rows) for rows in (1, 256)])
    requests = [make_request(number, [1, 2], 8) for number in range(running)]
    for inline in (True, False):
        controller = ModeController[SpeculationMode](MODES)
        hello = replace(HELLO, prefill_ms=0.2)
        planner = governed(controller, cost, drafters=joined(hello, synchronous=inline))
        planner.choose(requests, [ScheduledChunk(requests[0], (0, 1), final=True)], lambda: None)
        assert controller.prefill_slowdown(SpeculationMode.SYNC) == pytest.approx(1 + slower * inline)
        assert (
            controller.prefill_slowdown(SpeculationMode.ASYNC)
            == controller.prefill_slowdown(SpeculationMode.PLAIN)
            == 1.0
        )


def forecast_gain(mode: SpeculationMode, prefill_ms: float, prompt: int = 50) -> float:
    modes = (mode, SpeculationMode.PLAIN)
    controller = ModeController[SpeculationMode](modes)
    shared_cores, whole = (
        CostTable([Timing(rows, 0, seconds) for rows in (1, 64)]) for seconds in (0.020, 0.015)
    )
    mode_config = ModeConfig(
        controller,
        StillCores(),
        {mode: shared_cores, SpeculationMode.PLAIN: whole},
        dict.fromkeys(modes, NoWait()),
        shared_cores,
    )
    drafters = joined(replace(HELLO, prefill_ms=prefill_ms), synchronous=mode is SpeculationMode.SYNC)
    planner = governed(controller, shared_cores, mode_config, drafters)
    request = make_request(0, [7] * prompt, 40)
    planner.choose([request], [ScheduledChunk(request, tuple(range(prompt)), final=True)], lambda: None)
    assert controller.forecast is not None
    return controller.forecast(1)[mode]


@pytest.mark.parametrize("mode", [SpeculationMode.ASYNC, SpeculationMode.SYNC])
def test_forecast_falls_with_the_drafters_prefill_time(
    mode: SpeculationMode,
) -> None:
    assert forecast_gain(mode, 0.4) < forecast_gain(mode, 0.1) < forecast_gain(mode, 0.0)
    assert forecast_gain(mode, 0.4, prompt=100) < forecast_gain(mode, 0.4, prompt=50)
