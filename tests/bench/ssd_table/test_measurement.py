"""Which servers the table starts, and what it makes of known answers, beside what others published."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ssd_serve.base.devices import Machine
from ssd_serve.base.engine_settings import Mode
from ssd_serve.base.errors import UserError
from ssd_serve.base.settings import Settings
from ssd_serve.bench.completions import Speculation
from ssd_serve.bench.load.client import Answer
from ssd_serve.bench.ssd_table.measurement import (
    Measurements,
    RankedWay,
    device_count,
    record,
    table,
    ways_of,
)
from ssd_serve.bench.ssd_table.published import AMD, TABLE
from ssd_serve.bench.ssd_table.report import ssd_tables
from ssd_serve.cluster.placement import place
from tests.end_to_end.tiny_pair import write_pair

PLAIN, SYNC, SSD = (RankedWay(mode, 1) for mode in (Mode.AR, Mode.SD, Mode.SSD))
PLAN = {"prompts": 3, "tokens": 512, "temperature": 0.0, "launches": 2, "exact": False}


def answer(decode: float, first_s: float = 1.0, tokens: int = 101, error: str = "") -> Answer:
    """Half of the tokens after the first come in the middle, at `decode` tokens a second."""
    half = (tokens - 1) // 2
    times = [first_s, first_s + half / decode, first_s + (tokens - 1) / decode]
    arrivals = tuple(zip(times, (1, half, tokens - 1 - half), strict=True))
    return Answer(0.0, 0.0, times[-1], arrivals, Speculation(50, tokens, 50), error)


def found(speeds: dict[RankedWay, list[list[float]]]) -> Measurements:
    """Speeds by way, launch and prompt."""
    seen = Measurements()
    for way, launches in speeds.items():
        for launch, prompts in enumerate(launches):
            record(seen, way, launch, [answer(speed) for speed in prompts])
    return seen


def test_every_number_of_ranks_has_three_servers_that_always_speculate() -> None:
    ways, refused = ways_of(Settings(), (1, 2), Machine((0, 1, 2, 3), 0))
    assert [way.name for way in ways] == ["ar-tp1", "sd-tp1", "ssd-tp1", "ar-tp2", "sd-tp2", "ssd-tp2"]
    assert refused == {}
    for way, own in ways.items():
        assert (own.mode, own.tensor_parallel) == (way.mode, way.ranks)
        assert not own.speculation_may_stop
        assert not own.prefix_cache


def test_ranks_that_the_machine_has_no_gpus_for_are_named_and_the_rest_is_measured() -> None:
    ways, refused = ways_of(Settings(), (1, 4), Machine((0, 1), 2))
    assert {way.ranks for way in ways} == {1}
    assert {way.ranks for way in refused} == {4}
    assert all("4 GPUs" in why for why in refused.values())


def test_ranks_that_cannot_share_the_target_are_named(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path)
    ways, refused = ways_of(Settings(target=str(target), draft=str(draft)), (2, 4), Machine((0, 1), 0))
    assert {way.ranks for way in ways} == {2}
    assert all("4 ranks cannot share 2 attention heads" in why for why in refused.values())


def test_a_machine_that_can_run_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="nothing of the table can be measured"):
        ways_of(Settings(), (4,), Machine((0, 1), 2))


@pytest.mark.parametrize(
    ("mode", "ranks", "devices"), [("ar", 2, 2), ("sd", 1, 1), ("ssd", 1, 2), ("ssd", 2, 3)]
)
def test_devices_are_those_of_target_and_drafter(mode: str, ranks: int, devices: int) -> None:
    settings = Settings(mode=Mode(mode), tensor_parallel=ranks)
    assert device_count(place(settings, Machine((0, 1), 4))) == devices


def test_speed_is_from_the_first_token_on_and_of_the_whole_request() -> None:
    told: Any = table(found({PLAIN: [[50.0, 100.0, 200.0]]}), {PLAIN: 4})
    (row,) = told["results"]
    assert row["tokens_per_s"] == 100.0
    assert row["tokens_per_s_a_device"] == 25.0
    assert row["whole_request_tokens_per_s"] == pytest.approx(101 / 2)
    assert row["tokens_per_round"] == 2.0
    assert (row["requests"], row["failed"]) == (3, 0)


def test_ratios_are_of_the_same_prompt_in_the_same_launch() -> None:
    speeds = {PLAIN: [[50.0, 100.0], [25.0, 80.0]], SSD: [[200.0, 400.0], [100.0, 320.0]]}
    told: Any = table(found(speeds), {PLAIN: 1, SSD: 2})
    (ratio,) = told["ratios"]
    assert ratio["against"] == "ar"
    assert ratio["faster"] == pytest.approx(dict.fromkeys(("median", "mean", "low", "high"), 4.0))
    assert not ratio["same_devices"]


def test_ssd_is_also_compared_where_the_others_have_as_many_devices() -> None:
    wide = RankedWay(Mode.SD, 2)
    told: Any = table(
        found({SYNC: [[100.0] * 2], wide: [[150.0] * 2], SSD: [[180.0] * 2]}), {SYNC: 1, wide: 2, SSD: 2}
    )
    means = {(one["against_ranks"], one["same_devices"]): one["faster"]["mean"] for one in told["ratios"]}
    assert means == pytest.approx({(1, False): 1.8, (2, True): 1.2})


def test_failed_answers_and_those_in_one_piece_have_no_speed() -> None:
    seen = Measurements()
    whole = replace(answer(10.0), arrivals=((1.0, 101),))
    record(seen, PLAIN, 0, [answer(10.0), whole, answer(99.0, error="status 500")])
    assert [sample.decode for sample in seen.samples[PLAIN].values()] == [10.0]
    record(seen, SSD, 0, [answer(99.0, error="status 500")])
    assert seen.refused == {SSD: "status 500"}


def test_published_figures_have_the_factors_that_were_published_with_them() -> None:
    assert f"{AMD.of_plain:.2f} {AMD.of_sync:.2f}" == "4.32 1.64"
    assert all(one.plain < one.sync < one.ssd for one in TABLE)


def test_what_others_published_stands_beside_the_same_number_of_ranks() -> None:
    ways = {
        RankedWay(mode, ranks): ranks + (mode is Mode.SSD)
        for ranks in (1, 4)
        for mode in (Mode.AR, Mode.SD, Mode.SSD)
    }
    speeds = {way: [[10.0 * devices, 12.0 * devices]] for way, devices in ways.items()}
    seen = found(speeds)
    seen.refused[RankedWay(Mode.AR, 2)] = "2 GPUs are needed"
    lines = ssd_tables({**table(seen, ways), "plan": PLAN}).splitlines()
    four = [line for line in lines if line.startswith("| 4 | ")]
    assert [line.split(" | ")[-1] for line in four] == ["52.3, 4.32x |", "138, 1.64x |", "225.86 |"]
    assert all(line.endswith("|  |") for line in lines if line.startswith("| 1 | "))
    assert "- not measured: ar-tp2: 2 GPUs are needed" in lines
    assert any("1.25x (1.25 to 1.25): better" in line for line in four)
    for block in "\n".join(lines).split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1
