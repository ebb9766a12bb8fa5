"""Rows, pairs and ratios of the closed loop from bursts of known speed."""

from dataclasses import replace

import pytest

from ssd_serve.bench.completions import Speculation
from ssd_serve.bench.load.client import Answer
from ssd_serve.bench.load.outcome import Burst, pairs, ratios, results
from ssd_serve.bench.load.statistics import GoodLimits
from ssd_serve.bench.statistics import Interval

LIMITS = GoodLimits(ttft_ms=10_000, tpot_ms=10_000)


def burst(mode: str, speed: float, pair: int = 0, concurrency: int = 4, order: int = 0) -> Burst:
    """Two answers of 50 tokens at the same time, at `speed` tokens a second together."""
    seconds = 100 / speed
    answer = Answer(0.0, 0.0, seconds, ((seconds / 2, 1), (seconds, 49)), Speculation(25, 50, 25, 75, 20, 5))
    return Burst(mode, concurrency, pair % 2, pair, order, (answer, answer), 0.1, 0.9, 0.01)


def speeds(**modes: list[float]) -> list[Burst]:
    return [
        burst(mode.replace("_", "-"), speed, pair)
        for mode, own in modes.items()
        for pair, speed in enumerate(own)
    ]


def test_a_row_for_each_mode_and_concurrency() -> None:
    bursts = [*speeds(ar=[10.0, 20.0, 40.0]), burst("auto", 80.0), burst("ar", 5.0, concurrency=8)]
    rows = results(bursts, "real", LIMITS)
    assert [(row["concurrency"], row["mode"]) for row in rows] == [(4, "ar"), (4, "auto"), (8, "ar")]
    first = rows[0]
    assert first["tokens_per_s"] == 20.0
    assert first["tokens_per_s_quartiles"] == [15.0, 20.0, 30.0]
    assert (first["requests"], first["bursts"], first["failed"]) == (6, 3, 0)
    assert first["goodput_requests_per_s"] == pytest.approx(6 / 17.5, abs=1e-3)
    assert first["tokens_per_round"] == 2.0
    assert first["nodes_per_round"] == 3.0
    assert (first["client_cpu_share"], first["idle_servers_cpu_share"]) == (0.1, 0.01)


def test_where_arrivals_decide_about_throughput_modes_are_compared_by_the_time_of_a_request() -> None:
    bursts = [replace(one, offered=0.9, concurrency=0) for one in speeds(ar=[10.0, 20.0], auto=[20.0, 40.0])]
    late = replace(bursts[0].answers[0], due_s=-10.0)
    bursts[0] = replace(bursts[0], answers=(late, bursts[0].answers[1]))
    (row, _) = results(bursts, "real", LIMITS)
    assert (row["offered"], row["concurrency"]) == (0.9, 0)
    assert row["whole_ms"] == {"p50": 7500.0, "p90": 17000.0, "p99": 19700.0}
    assert row["most_at_once"] == 2
    assert bursts[0].speed == pytest.approx(1 / 15)
    (ratio,) = ratios(bursts)
    assert ratio.faster is not None
    assert ratio.faster.mean == pytest.approx((3 * 2) ** 0.5)


def test_pairs_hold_every_mode_in_the_order_of_measurement() -> None:
    bursts = [burst("ar", 10.0, order=1), burst("auto", 30.0, order=0), burst("ar", 20.0, pair=1)]
    found = pairs(bursts, "real")
    assert [(row["pair"], row["launch"]) for row in found] == [(0, 0), (1, 1)]
    first = found[0]["tokens_per_s"]
    assert isinstance(first, dict)
    assert list(first.items()) == [("auto", 30.0), ("ar", 10.0)]


def test_ratios_are_of_the_same_pair_and_name_the_best_mode() -> None:
    rows = ratios(speeds(ar=[10.0, 20.0, 30.0], ssd=[20.0, 40.0, 60.0], auto=[22.0, 44.0, 66.0]))
    told = {row.ratio: row for row in rows}
    assert set(told) == {"auto/ar", "auto/ssd"}
    assert told["auto/ssd"].faster == Interval(1.1, 1.1, 1.1, 1.1)
    assert told["auto/ar"].faster == Interval(2.2, 2.2, 2.2, 2.2)
    assert (told["auto/ssd"].best, told["auto/ar"].best) == (True, False)
    assert {row.pairs for row in rows} == {3}


def test_modes_are_judged_among_those_with_the_same_devices() -> None:
    bursts = speeds(
        ar=[10.0, 10.0],
        ssd=[20.0, 20.0],
        auto=[20.0, 20.0],
        ar_all_devices=[30.0, 30.0],
        auto_all_devices=[30.0, 30.0],
    )
    rows = {row.ratio: row for row in ratios(bursts)}
    assert list(rows) == ["auto/ar", "auto/ssd", "auto-all-devices/ar-all-devices", "auto-all-devices/ssd"]
    best = [name for name, row in rows.items() if row.best]
    assert best == ["auto/ssd", "auto-all-devices/ar-all-devices"]
    assert rows["auto-all-devices/ssd"].faster == Interval(1.5, 1.5, 1.5, 1.5)


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ([1.1, 1.1, 1.1], "better"),
        ([0.97, 0.97, 0.97], "as good"),
        ([0.96, 0.96, 0.96], "worse"),
        ([0.94, 0.96, 1.2], "not shown"),
    ],
)
def test_auto_is_judged_by_its_interval(factors: list[float], expected: str) -> None:
    (row,) = ratios(speeds(auto=[100 * factor for factor in factors], ssd=[100.0] * 3))
    assert row.faster is not None
    assert row.faster.verdict.value == expected


def test_a_burst_with_a_failed_request_is_in_no_ratio() -> None:
    bursts = speeds(auto=[10.0, 10.0, 10.0], ar=[10.0, 10.0, 10.0])
    answer = replace(bursts[-1].answers[0], error="status 500")
    failed = replace(bursts[-1], answers=(answer, *bursts[-1].answers[1:]))
    (row,) = ratios([*bursts[:-1], failed])
    assert (row.pairs, row.faster) == (2, Interval(1.0, 1.0, 1.0, 1.0))
    assert [each["failed"] for each in results([*bursts[:-1], failed], "real", LIMITS)] == [1, 0]


def test_one_pair_judges_nothing() -> None:
    (row,) = ratios(speeds(auto=[10.0], ar=[10.0]))
    assert (row.pairs, row.faster) == (1, None)


def test_without_auto_there_are_no_ratios() -> None:
    assert ratios(speeds(ar=[10.0], ssd=[10.0])) == []
