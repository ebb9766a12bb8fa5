"""Calibration error, Brier score and the points of a reliability diagram."""

import numpy as np
import pytest

from lab.calibration.figures import reliability


def guesses(*groups: tuple[float, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Groups of (prediction, how many, how many of them happened)."""
    predicted = np.concatenate([np.full(count, value) for value, count, _ in groups])
    happened = np.concatenate([np.arange(count) < times for _, count, times in groups]).astype(float)
    return predicted, happened


def test_true_predictions_have_no_calibration_error() -> None:
    found = reliability(*guesses((0.1, 100, 10), (0.5, 40, 20), (0.9, 10, 9)))
    assert found.expected_calibration_error == pytest.approx(0.0, abs=1e-12)
    assert [round(mean, 9) for mean, _, _ in found.bins] == [0.1, 0.5, 0.9]
    assert [round(share, 9) for _, share, _ in found.bins] == [0.1, 0.5, 0.9]
    assert [count for _, _, count in found.bins] == [100, 40, 10]
    assert found.gain > 0.3


def test_errors_count_by_the_number_of_guesses() -> None:
    found = reliability(*guesses((0.1, 300, 60), (0.9, 100, 50)))
    assert found.expected_calibration_error == pytest.approx(0.75 * 0.1 + 0.25 * 0.4)
    assert found.brier == pytest.approx((60 * 0.81 + 240 * 0.01 + 50 * 0.01 + 50 * 0.81) / 400)


def test_the_base_rate_gains_nothing_on_itself() -> None:
    found = reliability(*guesses((0.25, 80, 20)))
    assert found.base_brier == pytest.approx(0.25 * 0.75)
    assert found.gain == pytest.approx(0.0)


def test_being_sure_and_wrong_is_worse_than_the_base_rate() -> None:
    assert reliability(*guesses((0.99, 50, 5), (0.01, 50, 45))).gain < -1


def test_certainty_falls_into_the_last_bin_and_nothing_is_no_error() -> None:
    assert reliability(np.array([1.0, 1.0]), np.array([1.0, 1.0])).bins == ((1.0, 1.0, 2),)
    assert reliability(np.array([]), np.array([])).count == 0
