"""The soak finds what leaks, hangs about or changes; and a short one of a real server finds nothing."""

import dataclasses
import random
import statistics
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scipy.stats import theilslopes

from ssd_serve.base.engine_settings import Mode
from ssd_serve.base.settings import Settings
from tests.chaos.soak.experiment import SoakPlan, run_soak
from tests.chaos.soak.processes import Series
from tests.chaos.soak.report import judge, process_figures, soak_table
from tests.chaos.soak.statistics import STRETCHES, after_warm_up, slope
from tests.end_to_end.tiny_pair import write_pair

SECONDS = [float(second) for second in range(1800)]


def memory(mib_an_hour: float, noise: float = 2.0) -> list[float]:
    source = random.Random(5)
    return [300 + mib_an_hour * second / 3600 + source.gauss(0, noise) for second in SECONDS]


def figures(values: list[float], descriptors: int = 10) -> dict[str, Any]:
    """A result with one process, which held these."""
    count = len(values)
    series = Series("verifier", 7, SECONDS[:count], values, [10] * (count - 1) + [descriptors], [3] * count)
    return {
        "mode": "ssd",
        "requests": {"whole": 3},
        "failed": 0,
        "failures": [],
        "probes": 5,
        "disturbances": {},
        "processes": [dataclasses.asdict(each) for each in process_figures([series], 60.0)],
        "end": {
            "held": {"ssd_num_requests_running": 0.0},
            "told": {},
            "exit_code": 0,
            "orphans": [],
            "leftovers": [],
        },
    }


@pytest.mark.parametrize("mib_an_hour", [0.0, 50.0, -20.0])
def test_the_slope_of_a_noisy_line_and_its_interval(mib_an_hour: float) -> None:
    found = slope(SECONDS, memory(mib_an_hour))
    assert found is not None
    assert found.low < mib_an_hour < found.high
    assert found.high - found.low < 10
    assert found.hours == pytest.approx(0.5, rel=0.01)


def test_the_slope_is_that_of_theil_and_sen_over_stretches() -> None:
    values = memory(20.0)
    stretches = [range(45 * place, 45 * (place + 1)) for place in range(STRETCHES)]
    points = [
        (
            statistics.fmean(SECONDS[each] / 3600 for each in some),
            statistics.fmean(values[each] for each in some),
        )
        for some in stretches
    ]
    times, levels = zip(*points, strict=True)
    found = slope(SECONDS, values)
    assert found is not None
    assert found.value == pytest.approx(theilslopes(levels, times)[0])


def test_a_spike_does_not_tilt_the_slope() -> None:
    values = memory(0.0)
    values[1700:1740] = [900.0] * 40
    found = slope(SECONDS, values)
    assert found is not None
    assert abs(found.value) < 5


def test_few_samples_have_no_slope() -> None:
    assert slope(SECONDS[:11], memory(0.0)[:11]) is None


def test_the_warm_up_is_left_out() -> None:
    assert after_warm_up([5.0, 6.0, 7.0, 8.0], 2.0) == 2
    assert after_warm_up([5.0, 6.0], 60.0) == 2
    values = [value + max(0.0, 60 - second) * 5 for second, value in zip(SECONDS, memory(0.0), strict=True)]
    (found,) = process_figures([Series("a", 1, SECONDS, values, [1] * 1800, [1] * 1800)], 60.0)
    assert found.slope is not None
    assert abs(found.slope.value) < 5
    assert found.max_mib > 590


def test_flat_memory_is_no_problem_and_a_leak_is_one() -> None:
    assert judge(figures(memory(10.0))) == []
    (problem,) = judge(figures(memory(80.0)))
    assert problem.startswith("verifier 7 grows by ")


def test_a_short_series_judges_nobody() -> None:
    assert judge(figures(memory(5000.0)[:300])) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"held": {"ssd_kv_cache_usage_perc": 0.25}}, "in silence ssd_kv_cache_usage_perc is 0.25, not 0"),
        ({"exit_code": None}, "the server's exit code was None, not 0"),
        ({"orphans": ["verifier 7"]}, "still running: verifier 7"),
        ({"leftovers": ["server.sock"]}, "left in the run directory: server.sock"),
    ],
)
def test_what_is_left_in_the_end_is_a_problem(change: dict[str, Any], problem: str) -> None:
    result = figures(memory(0.0))
    result["end"].update(change)
    assert judge(result) == [problem]
    assert f"PROBLEM: {problem}" in soak_table({**result, "problems": [problem]})


def test_open_descriptors_and_failures_are_problems() -> None:
    assert judge(figures(memory(0.0), descriptors=30)) == [
        "verifier 7 has 30 descriptors open, 10 after the warm-up"
    ]
    assert judge({**figures(memory(0.0)), "failed": 1, "failures": ["status 500"]}) == ["failed: status 500"]
    assert judge({**figures(memory(0.0)), "requests": {}}) == ["no request was answered"]


@pytest.mark.slow
def test_a_short_soak_of_a_real_server_finds_nothing(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path)
    settings = Settings(target=str(target), draft=str(draft), mode=Mode.SSD, cache_dir=tmp_path / "cache")
    said: list[str] = []
    plan = SoakPlan(minutes=0.15, clients=4, kills=("drafter",), disturb_s=2.0)
    result = msgspec.json.decode(msgspec.json.encode(run_soak(settings, plan, said.append)))
    assert result["problems"] == []
    assert sum(result["requests"].values()) > plan.clients
    assert result["probes"] >= 3
    assert result["disturbances"]["killed drafter"] >= 1
    assert sum(result["disturbances"].values()) >= 2
    assert {"server", "verifier", "drafter-0"} <= {each["name"] for each in result["processes"]}
    assert result["end"]["told"]["ssd_generation_tokens_total"] > 100
    assert "Nothing was off." in soak_table(result)
