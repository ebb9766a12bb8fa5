"""`python -m lab.calibration`: candidates are written down, judged by the text, and summed up."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pytest

from lab.calibration.chart import MIN_SHOWN, plot
from lab.calibration.experiment import CalibrationPlan, Guess, run_calibration
from lab.calibration.report import calibration_table
from ssd_serve.errors import UserError
from tests.lab.virtual_fakes import fake_pair, fake_prompts

pytestmark = pytest.mark.slow

SMALL = CalibrationPlan(
    temperatures=(0.0, 1.0), tokens=80, warm_up=40, prompt_tokens=20, width=4, fan_out=4, depth=4
)


@pytest.fixture(scope="module")
def result() -> dict[str, object]:
    return run()


def run(blur: float = 0.5) -> dict[str, object]:
    return run_calibration(fake_pair(blur), fake_prompts(12), SMALL, lambda text: None)


def rows(result: Mapping[str, object]) -> list[dict[str, Any]]:
    return cast(list[dict[str, Any]], result["results"])


@pytest.mark.parametrize(
    ("path", "happened"),
    [((4,), True), ((4, 5), True), ((5,), False), ((4, 6), False), ((4, 5, 6), None), ((9, 9, 9), None)],
)
def test_a_guess_happened_when_the_text_goes_on_along_its_path(
    path: tuple[int, ...], happened: bool | None
) -> None:
    assert Guess(3, path, 0.5, True, "s").judge((1, 2, 3, 4, 5)) is happened


def test_every_temperature_and_source_has_figures_after_the_warm_up(result: dict[str, object]) -> None:
    found = rows(result)
    assert [(row["temperature"], row["source"]) for row in found] == [
        (0.0, "draft-model"),
        (1.0, "draft-model"),
    ]
    for row in found:
        assert row["warm_up_tokens"] >= 40
        assert row["tokens"] >= 80
        assert row["all"]["count"] > row["likely"]["count"] > 0
        assert row["all"]["count"] > row["verified"]["count"] > 0
        assert sum(count for _, _, count in row["all"]["bins"]) == row["all"]["count"]
        assert 0 < row["all"]["happened"] < 1


def test_virtual_time_makes_results_repeatable(result: dict[str, object]) -> None:
    assert rows(run()) == rows(result)


def test_a_draft_that_knows_less_is_told_apart(result: dict[str, object]) -> None:
    assert rows(result)[1]["all"]["gain"] > rows(run(blur=3.0))[1]["all"]["gain"] + 0.1


def test_the_report_has_a_line_a_kind_and_a_panel_a_temperature(result: dict[str, object]) -> None:
    table = calibration_table(result)
    assert table.count("| draft-model |") == 6
    assert "virtual" in table
    panels = plot(result).axes
    assert [each.get_title(loc="left") for each in panels] == ["temperature 0", "temperature 1"]
    for panel, row in zip(panels, rows(result), strict=True):
        _, dots = panel.get_lines()  # the diagonal first
        shown = [[reach, share] for reach, share, count in row["all"]["bins"] if count >= MIN_SHOWN]
        assert shown
        assert np.asarray(dots.get_xydata()) == pytest.approx(np.array(shown))


def test_other_results_are_refused() -> None:
    with pytest.raises(UserError, match="not a result"):
        calibration_table({"results": [{"mode": "ar"}], "time": "real"})
