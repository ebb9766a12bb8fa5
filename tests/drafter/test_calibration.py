"""The scale of reach follows the outcomes."""

import math

import numpy as np
import pytest

from ssd_serve.drafter.calibration import Calibration
from ssd_serve.drafter.sources.contract import Candidates

SCORES = np.array([0.0, -1.0, -2.0, -4.0], dtype=np.float32)


def candidates(scale: float) -> Candidates:
    """Candidates ranked under `scale`, with the mean score that the kernel reports."""
    weights = np.exp(SCORES / scale)
    weights /= weights.sum()
    expected = float((weights * SCORES).sum())
    tokens = np.array([10, 11, 12, 13], dtype=np.int32)
    return Candidates(tokens, np.log(weights).astype(np.float32), SCORES, expected)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_correct_candidates_lower_the_scale_and_wrong_ones_raise_it(temperature: float) -> None:
    for token, direction in ((10, -1), (13, 1), (99, 1)):
        calibration = Calibration()
        before = calibration.scale(temperature)
        calibration.observe(temperature, candidates(before), token)
        assert math.copysign(1, calibration.scale(temperature) - before) == direction


def test_each_band_of_temperature_has_its_own_scale() -> None:
    calibration = Calibration()
    others = [calibration.scale(temperature) for temperature in (0.7, 1.0)]
    for _ in range(20):
        calibration.observe(0.0, candidates(calibration.scale(0.0)), 13)
    assert calibration.scale(0.0) > 0.7
    assert [calibration.scale(temperature) for temperature in (0.7, 1.0)] == others


@pytest.mark.parametrize("truth", [0.6, 2.0])
def test_calibration_finds_the_scale_that_outcomes_follow(truth: float) -> None:
    calibration, source = Calibration(), np.random.default_rng(3)
    chances = np.exp(SCORES / truth) / np.exp(SCORES / truth).sum()
    tail: list[float] = []
    for step in range(6000):
        token = 10 + int(source.choice(4, p=chances))
        calibration.observe(1.0, candidates(calibration.scale(1.0)), token)
        if step > 2000:
            tail.append(calibration.scale(1.0))
    assert float(np.exp(np.mean(np.log(tail)))) == pytest.approx(truth, rel=0.12)


def test_scale_stays_within_bounds() -> None:
    for token in (10, 99):
        calibration = Calibration()
        for _ in range(3000):
            calibration.observe(1.0, candidates(calibration.scale(1.0)), token)
        assert 0.2 <= calibration.scale(1.0) <= 5.0


def test_each_depth_has_its_own_scale_once_it_is_known() -> None:
    calibration = Calibration()
    for _ in range(200):
        calibration.observe(0.0, candidates(calibration.scale(0.0)), 10)
    assert len({each[0] for each in calibration.scales(0.0)}) == 1
    for _ in range(200):
        calibration.observe(0.0, candidates(calibration.scale(0.0, 2)), 13, depth=2)
    first, second, *deeper = [each[0] for each in calibration.scales(0.0)]
    assert first == second == calibration.scale(0.0)
    assert set(deeper) == {calibration.scale(0.0, 2)}
    assert calibration.scale(0.0, 2) > 2 * first
    assert calibration.scale(0.0, 99) == calibration.scale(0.0, 3)
