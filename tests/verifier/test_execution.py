"""Tests of the execution planner and its thread count: cores of prefill and decode rounds."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from ssd_serve.base.cost import CostTable, Reading, Timing
from ssd_serve.bench.memory_channel import memory_pair
from ssd_serve.verifier.control.budget import NoWait
from ssd_serve.verifier.control.execution import ExecutionPlanner, ModeConfig, ThreadCountSelector
from ssd_serve.verifier.control.mode_controller import ModeController
from ssd_serve.verifier.drafters.pool import DrafterPool, SpeculationMode
from tests.examples import examples
from tests.fakes import HELLO, StillCores

MODES = (SpeculationMode.ASYNC, SpeculationMode.SYNC, SpeculationMode.PLAIN)


class ExecutionHarness:
    """Target that runs `faster` times as fast on all cores, with a connected drafter."""

    def __init__(self, faster: float, forecast: dict[SpeculationMode, float]) -> None:
        self.drafters = DrafterPool(HELLO)
        mine, its = memory_pair()
        self.drafters.connect(mine)
        its.send(HELLO)
        self.drafters.drain({})
        self.shared_cores = CostTable([Timing(1, 0, 0.01), Timing(64, 0, 0.1)])
        self.whole = CostTable([Timing(1, 0, 0.01 / faster), Timing(64, 0, 0.1 / faster)])
        controller = ModeController(MODES)
        controller.load_prior({1: forecast})
        self.cores = StillCores()
        costs = {mode: self.shared_cores if mode is SpeculationMode.ASYNC else self.whole for mode in MODES}
        mode_config = ModeConfig(
            controller, self.cores, costs, {mode: NoWait() for mode in MODES}, self.shared_cores
        )
        self.execution = ExecutionPlanner(
            self.drafters, self.shared_cores, NoWait(), mode_config, lambda: 0.0
        )

    def round(self, decoding: int, rows: int) -> tuple[SpeculationMode, bool]:
        self.execution.choose(2, decoding, rows, Reading())
        return self.cores.entered[-1]


ASYNC_IS_BEST = {SpeculationMode.ASYNC: 2.0, SpeculationMode.SYNC: 1.0, SpeculationMode.PLAIN: 1.0}


def test_prefill_runs_on_all_cores_and_pauses_the_drafter() -> None:
    harness = ExecutionHarness(1.8, ASYNC_IS_BEST)
    assert harness.round(decoding=1, rows=2) == (SpeculationMode.ASYNC, True)
    assert harness.drafters.working
    assert harness.round(decoding=1, rows=64) == (SpeculationMode.PLAIN, True)
    assert harness.round(decoding=0, rows=64) == (SpeculationMode.PLAIN, True)
    assert harness.execution.prefilling_alone
    assert harness.execution.cost is harness.whole
    assert not harness.drafters.working
    assert harness.round(decoding=1, rows=1) == (SpeculationMode.ASYNC, True)
    assert not harness.execution.prefilling_alone
    assert harness.execution.cost is harness.shared_cores
    assert harness.drafters.working


def test_rounds_without_gain_by_all_cores_keep_the_drafters_core() -> None:
    harness = ExecutionHarness(1.8, ASYNC_IS_BEST)
    assert harness.round(decoding=32, rows=32) == (SpeculationMode.ASYNC, True)
    harness = ExecutionHarness(1.05, ASYNC_IS_BEST)
    assert harness.round(decoding=0, rows=64) == (SpeculationMode.ASYNC, True)
    assert not harness.execution.prefilling_alone


def test_plain_decoding_uses_only_cores_that_make_it_faster() -> None:
    plain = {SpeculationMode.ASYNC: 0.5, SpeculationMode.SYNC: 0.5, SpeculationMode.PLAIN: 1.0}
    slow, fast = ExecutionHarness(1.05, plain), ExecutionHarness(1.8, plain)
    assert slow.round(decoding=1, rows=1) == (SpeculationMode.PLAIN, False)
    assert slow.execution.cost is not slow.whole
    assert fast.round(decoding=1, rows=1) == (SpeculationMode.PLAIN, True)
    assert fast.execution.cost is fast.whole


FEW_S, ALL_S = 0.010, 0.006


class Machine:
    """Simulated forwards on some or all cores; `slower` multiplies the time on all cores."""

    def __init__(self, all_s: float = ALL_S) -> None:
        self.now = 0.0
        self.slower = 1.0
        self.seconds = {False: FEW_S, True: all_s}
        shared_cores, whole = (
            CostTable([Timing(1, 0, self.seconds[all_cores])]) for all_cores in (False, True)
        )
        self.choice = ThreadCountSelector(shared_cores, whole, lambda: self.now)

    def round(self) -> bool:
        all_cores = self.choice.all_cores(1, Reading())
        seconds = self.seconds[all_cores] * (self.slower if all_cores else 1.0)
        self.choice.observe(all_cores, 1, seconds, Reading())
        self.now += seconds
        return all_cores

    def run(self, seconds: float) -> list[bool]:
        """Run rounds for so many seconds, and return for each whether it used all cores."""
        end, rounds = self.now + seconds, list[bool]()
        while self.now < end:
            rounds.append(self.round())
        return rounds


@pytest.mark.parametrize(("all_s", "used"), [(0.006, True), (0.0095, False), (0.020, False)])
def test_all_cores_are_used_where_they_are_faster(all_s: float, used: bool) -> None:
    assert set(Machine(all_s).run(5.0)) == {used}


def test_core_that_becomes_slow_is_left_until_it_recovers() -> None:
    machine = Machine()
    machine.run(1.0)
    machine.choice.observe(True, 1, 1.0, Reading())
    assert all(machine.run(1.0)), "one descheduled round changes nothing"
    machine.slower = 4.0
    assert sum(machine.run(0.5)) <= 4
    assert sum(machine.run(10.0)) <= 11  # one trial per second
    machine.slower = 1.0
    machine.run(1.3)
    assert all(machine.run(5.0))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 99), st.floats(1e-6, 10.0)), max_size=50))
@settings(max_examples=examples(30))
def test_thread_count_recovers_after_any_observations(seen: list[tuple[bool, int, float]]) -> None:
    machine = Machine()
    for all_cores, rows, seconds in seen:
        machine.choice.observe(all_cores, rows, seconds, Reading())
    machine.run(4.0)
    assert all(machine.run(2.0))
