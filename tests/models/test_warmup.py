"""Tests of step time measurement: many repetitions of short steps, and few of long ones."""

import pytest

from ssd_serve.models import warmup
from tests.models.timed_steps import Steps


@pytest.mark.parametrize(
    ("step_s", "repeats"),
    [
        (0.0001, 32),
        (0.01, 14),
        (0.03, 4),
        (0.1, 3),
        (1.0, 1),
        (60.0, 1),
    ],
)
def test_short_steps_are_repeated_and_long_ones_are_not(
    step_s: float, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(step_s)
    monkeypatch.setattr(warmup, "time", steps)
    reported: list[str] = []
    found = warmup.measure_steps(steps, (1, 8), repeats=4, least_s=0.31, most_s=0.99, report=reported.append)
    assert [each.partition(",")[0] for each in reported] == [
        f"forward {n} of at least 4" for n in (1, 2, 3, 4)
    ]
    assert {key: len(seconds) for key, seconds in found.items()} == {(1, 128): repeats, (8, 128): repeats}
    assert {round(second / step_s, 6) for seconds in found.values() for second in seconds} == {1.0}
    assert steps.forwards == 2 * (1 + repeats)
