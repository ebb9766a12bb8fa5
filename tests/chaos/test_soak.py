"""A short soak of a real server finds nothing wrong; a leak and leftovers are found."""

import dataclasses
import random
from pathlib import Path

import pytest

from ssd_serve.base.engine_config import Mode
from ssd_serve.base.settings import Settings
from tests.chaos.processes import Series
from tests.chaos.slope import slope
from tests.chaos.soak import SoakPlan, SoakResult, problems, process_slope, run_soak
from tests.end_to_end.tiny_pair import write_pair

SECONDS = [float(second) for second in range(1800)]


def memory(mib_per_hour: float, noise: float = 2.0) -> list[float]:
    source = random.Random(5)
    return [300 + mib_per_hour * second / 3600 + source.gauss(0, noise) for second in SECONDS]


def result(values: list[float], descriptors: int = 10) -> SoakResult:
    count = len(values)
    series = Series("verifier", 7, SECONDS[:count], values, [10] * (count - 1) + [descriptors])
    return SoakResult({"whole": 3}, [], series=[series], exit_code=0)


@pytest.mark.parametrize("mib_per_hour", [0.0, 50.0, -20.0])
def test_slope_of_a_noisy_line_and_its_interval(mib_per_hour: float) -> None:
    found = slope(SECONDS, memory(mib_per_hour))
    assert found is not None
    assert found.low < mib_per_hour < found.high
    assert found.high - found.low < 10
    assert found.hours == pytest.approx(0.5, rel=0.01)


def test_spike_does_not_tilt_the_slope() -> None:
    values = memory(0.0)
    values[1700:1740] = [900.0] * 40
    found = slope(SECONDS, values)
    assert found is not None
    assert abs(found.value) < 5
    assert slope(SECONDS[:11], values[:11]) is None


def test_slope_leaves_out_the_warm_up() -> None:
    values = [value + max(0.0, 60 - second) * 5 for second, value in zip(SECONDS, memory(0.0), strict=True)]
    found = process_slope(Series("a", 1, SECONDS, values, [1] * 1800), 60.0)
    assert found is not None
    assert abs(found.value) < 5


def test_leak_is_a_problem_and_flat_or_short_memory_is_none() -> None:
    assert problems(result(memory(10.0)), 60.0) == []
    (problem,) = problems(result(memory(80.0)), 60.0)
    assert problem.startswith("verifier 7 grows by ")
    assert problems(result(memory(5000.0)[:300]), 60.0) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"held": {"ssd_kv_cache_usage_perc": 0.25}},
            "without requests ssd_kv_cache_usage_perc is 0.25, not 0",
        ),
        ({"exit_code": None}, "the server's exit code was None, not 0"),
        ({"orphans": ["verifier 7"]}, "still running: verifier 7"),
        ({"leftovers": ["server.sock"]}, "left in the run directory: server.sock"),
        ({"failures": ["status 500"]}, "failed: status 500"),
        ({"requests": {}}, "no request was answered"),
    ],
)
def test_what_is_left_or_fails_is_a_problem(change: dict[str, object], problem: str) -> None:
    changed = dataclasses.replace(result(memory(0.0)), **change)  # type: ignore[arg-type]
    assert problems(changed, 60.0) == [problem]


def test_open_descriptors_are_a_problem() -> None:
    (problem,) = problems(result(memory(0.0), descriptors=30), 60.0)
    assert problem == "verifier 7 has 30 descriptors open, before 10"


@pytest.mark.slow
def test_short_soak_of_a_real_server_finds_nothing(tmp_path: Path, cache_dir: Path) -> None:
    target, draft = write_pair(tmp_path)
    settings = Settings(target=str(target), draft=str(draft), mode=Mode.SSD, cache_dir=cache_dir)
    plan = SoakPlan(minutes=0.15, clients=4, kills=("drafter",), disturb_s=2.0)
    found = run_soak(settings, plan, lambda _line: None)
    assert problems(found, 3.0) == []
    assert sum(found.requests.values()) > plan.clients
    assert found.probes >= 3
    assert found.disturbances["killed drafter"] >= 1
    assert {"server", "verifier", "drafter-0"} <= {each.name for each in found.series}
