"""Restarts of a target that died, and giving up."""

import pytest

from ssd_serve.base.errors import CheckpointError, MemoryShortError
from ssd_serve.cluster.health import RestartPolicy, pause_before_restart
from tests.fakes import FakeClock

KILLED = -9


def test_pauses_grow_to_a_limit() -> None:
    assert [pause_before_restart(n) for n in range(5)] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert pause_before_restart(1000) == 30.0


def test_target_that_was_never_ready_is_not_restarted() -> None:
    assert RestartPolicy(FakeClock()).pause(KILLED) is None


def test_long_lived_target_restarts_without_pause() -> None:
    clock = FakeClock()
    comeback = RestartPolicy(clock)
    for _ in range(100):
        comeback.ready()
        clock.now += 60
        assert comeback.pause(KILLED) == 0.0
        assert comeback.ready_at is None


@pytest.mark.parametrize("loads", [True, False])
def test_quick_deaths_back_off_and_are_given_up(loads: bool) -> None:
    clock = FakeClock()
    comeback = RestartPolicy(clock)
    comeback.ready()
    clock.now += 60
    pauses: list[float | None] = []
    for _ in range(8):
        pauses.append(comeback.pause(KILLED))
        if loads:
            comeback.ready()
        clock.now += 2
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, None]


def test_user_errors_end_the_target_except_memory() -> None:
    comeback = RestartPolicy(FakeClock())
    comeback.ready()
    assert comeback.pause(MemoryShortError.exit_code) == 0.5
    assert comeback.pause(CheckpointError.exit_code) is None


def test_forgiven_deaths_do_not_count() -> None:
    clock = FakeClock()
    comeback = RestartPolicy(clock)
    for death in range(40):
        comeback.ready()
        clock.now += 2
        assert comeback.pause(KILLED) is not None
        if death % 4 == 3:
            comeback.forgive()
