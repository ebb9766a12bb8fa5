"""Tests of the thread count selector: rounds use all cores where that is faster."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from ssd_serve.base.cost import CostTable, Reading, Timing
from ssd_serve.verifier.control.execution import ThreadCountSelector

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


def test_all_cores_are_taken_where_they_are_faster() -> None:
    assert all(Machine().run(5.0))


@pytest.mark.parametrize("all_s", [0.0095, 0.010, 0.020])
def test_cores_that_gain_nothing_are_left_to_others(all_s: float) -> None:
    assert not any(Machine(all_s).run(5.0))


def test_a_core_that_another_process_takes_is_left_within_some_rounds() -> None:
    machine = Machine()
    machine.run(1.0)
    machine.slower = 4.0
    assert sum(machine.run(0.5)) <= 4
    rounds = machine.run(10.0)
    assert sum(rounds) <= 11  # one trial per second


def test_a_core_that_is_free_again_is_taken_within_about_a_second() -> None:
    machine = Machine()
    machine.slower = 4.0
    machine.run(3.0)
    machine.slower = 1.0
    machine.run(1.3)
    assert all(machine.run(5.0))


def test_one_descheduled_round_changes_nothing() -> None:
    machine = Machine()
    machine.run(1.0)
    machine.choice.observe(True, 1, 1.0, Reading())
    assert all(machine.run(1.0))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 99), st.floats(1e-6, 10.0)), max_size=50))
@settings(max_examples=30)
def test_whatever_is_seen_it_recovers(seen: list[tuple[bool, int, float]]) -> None:
    machine = Machine()
    for all_cores, rows, seconds in seen:
        machine.choice.observe(all_cores, rows, seconds, Reading())
    machine.run(4.0)
    assert all(machine.run(2.0))
