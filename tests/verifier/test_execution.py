"""Tests of the execution planner: cores of prefill and decode rounds."""

from ssd_serve.base.cost import CostTable, Reading, Timing
from ssd_serve.bench.memory_channel import memory_pair
from ssd_serve.verifier.control.budget import NoWait
from ssd_serve.verifier.control.decision import SpeculationMode
from ssd_serve.verifier.control.execution import ExecutionPlanner, ModeConfig
from ssd_serve.verifier.control.mode_controller import ModeController
from ssd_serve.verifier.drafters.pool import DrafterPool
from tests.fakes import HELLO, StillCores

WAYS = (SpeculationMode.ASYNC, SpeculationMode.SYNC, SpeculationMode.PLAIN)


class Place:
    """Target that runs `faster` times as fast on all cores, with a connected drafter."""

    def __init__(self, faster: float, forecast: dict[SpeculationMode, float]) -> None:
        self.drafters = DrafterPool(HELLO)
        mine, its = memory_pair()
        self.drafters.connect(mine)
        its.send(HELLO)
        self.drafters.drain({})
        self.shared_cores = CostTable([Timing(1, 0, 0.01), Timing(64, 0, 0.1)])
        self.whole = CostTable([Timing(1, 0, 0.01 / faster), Timing(64, 0, 0.1 / faster)])
        controller = ModeController(WAYS)
        controller.load_prior({1: forecast})
        self.cores = StillCores()
        costs = {way: self.shared_cores if way is SpeculationMode.ASYNC else self.whole for way in WAYS}
        mode_config = ModeConfig(
            controller, self.cores, costs, {way: NoWait() for way in WAYS}, self.shared_cores
        )
        self.execution = ExecutionPlanner(
            self.drafters, self.shared_cores, NoWait(), mode_config, lambda: 0.0
        )

    def round(self, decoding: int, rows: int) -> tuple[SpeculationMode, bool]:
        self.execution.choose(2, decoding, rows, Reading())
        return self.cores.entered[-1]


BESIDE_IS_BEST = {SpeculationMode.ASYNC: 2.0, SpeculationMode.SYNC: 1.0, SpeculationMode.PLAIN: 1.0}


def test_prefill_runs_on_all_cores_and_pauses_the_drafter() -> None:
    place = Place(1.8, BESIDE_IS_BEST)
    assert place.round(decoding=1, rows=1) == (SpeculationMode.ASYNC, True)
    assert place.drafters.working
    assert place.round(decoding=0, rows=64) == (SpeculationMode.PLAIN, True)
    assert place.execution.prefilling_alone
    assert place.execution.cost is place.whole
    assert not place.drafters.working
    assert place.round(decoding=1, rows=1) == (SpeculationMode.ASYNC, True)
    assert not place.execution.prefilling_alone
    assert place.execution.cost is place.shared_cores
    assert place.drafters.working


def test_long_prefill_chunk_beside_decoding_runs_on_all_cores() -> None:
    place = Place(1.8, BESIDE_IS_BEST)
    assert place.round(decoding=1, rows=2) == (SpeculationMode.ASYNC, True)
    assert place.drafters.working
    assert place.round(decoding=1, rows=64) == (SpeculationMode.PLAIN, True)
    assert place.execution.prefilling_alone
    assert place.round(decoding=1, rows=1) == (SpeculationMode.ASYNC, True)


def test_decode_rounds_keep_the_drafters_core() -> None:
    place = Place(1.8, BESIDE_IS_BEST)
    assert place.round(decoding=32, rows=32) == (SpeculationMode.ASYNC, True)


def test_prefill_without_gain_by_all_cores_stays() -> None:
    place = Place(1.05, BESIDE_IS_BEST)
    assert place.round(decoding=0, rows=64) == (SpeculationMode.ASYNC, True)
    assert not place.execution.prefilling_alone


def test_plain_decoding_takes_only_the_cores_that_it_gains_by() -> None:
    plain = {SpeculationMode.ASYNC: 0.5, SpeculationMode.SYNC: 0.5, SpeculationMode.PLAIN: 1.0}
    slow, fast = Place(1.05, plain), Place(1.8, plain)
    assert slow.round(decoding=1, rows=1) == (SpeculationMode.PLAIN, False)
    assert slow.execution.cost is not slow.whole
    assert fast.round(decoding=1, rows=1) == (SpeculationMode.PLAIN, True)
    assert fast.execution.cost is fast.whole
