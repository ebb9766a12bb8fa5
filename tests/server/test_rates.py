"""Rate-limit buckets: level, refill and waiting time."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_serve.server.access.tenants import Bucket


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def bucket(per_minute: int) -> tuple[Bucket, Clock]:
    clock = Clock()
    return Bucket(per_minute, clock), clock


def test_rate_bucket_allows_a_minute_at_once() -> None:
    found, clock = bucket(6)
    for _ in range(6):
        assert found.level >= 1
        found.take(1)
    assert found.level < 1
    assert found.wait_s() == pytest.approx(10)
    clock.now += 10.001
    assert found.level >= 1


def test_rate_bucket_overdraft_extends_the_wait() -> None:
    found, clock = bucket(60)
    found.take(300)
    assert (found.left, found.level) == (0, -240)
    assert found.wait_s() == pytest.approx(241)
    assert found.refill_s == pytest.approx(300)
    clock.now += 241.001
    assert found.level >= 1


def test_rate_bucket_keeps_its_level_with_a_new_limit() -> None:
    found, clock = bucket(60)
    found.take(50)
    found.per_minute = 600
    assert found.level == pytest.approx(10)
    clock.now += 1
    assert found.level == pytest.approx(20)
    found.per_minute = 5
    assert found.level == 5


STEPS = st.lists(st.tuples(st.integers(0, 120_000), st.integers(0, 50)), max_size=40)


@given(st.integers(1, 10_000), STEPS)
def test_rate_bucket_equals_exact_arithmetic(per_minute: int, steps: list[tuple[int, int]]) -> None:
    found, clock = bucket(per_minute)
    exact, taken, passed = Fraction(per_minute), 0, Fraction(0)
    for waited_ms, amount in steps:
        clock.now += waited_ms / 1000
        passed += Fraction(waited_ms, 1000)
        exact = min(Fraction(per_minute), exact + Fraction(waited_ms * per_minute, 60_000))
        assert found.level == pytest.approx(float(exact), abs=1e-4)
        assert found.wait_s() == pytest.approx(max(0.0, float((1 - exact) * 60 / per_minute)), abs=1e-3)
        if found.level >= 1 and exact >= 1:
            found.take(amount)
            exact -= amount
            taken += amount
    assert taken <= per_minute + float(passed) * per_minute / 60 + 50  # the last request may overdraw
