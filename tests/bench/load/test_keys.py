"""vLLM's names and definitions, on answers whose times are known."""

import pytest

from ssd_serve.bench.completions import Speculation
from ssd_serve.bench.load.client import Answer
from ssd_serve.bench.load.keys import detailed, most_at_once, serve_keys

VLLM = {
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("request_goodput", "output_throughput", "total_token_throughput", "max_concurrent_requests"),
    *(
        f"{which}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2el", "client_queue_time")
        for which in ("mean", "median", "std", "p99")
    ),
}
"""What `vllm bench serve` writes of a text server, lists and peaks by the second left out."""


def answer(
    sent_s: float,
    first_s: float,
    gap_s: float,
    chunks: int,
    counted: int | None = None,
    queued_s: float = 0.0,
) -> Answer:
    times = [sent_s + first_s + number * gap_s for number in range(chunks)]
    arrivals = tuple((at, 1) for at in times)
    return Answer(
        sent_s - queued_s, sent_s, times[-1], arrivals, Speculation(), counted=counted, prompt_tokens=20
    )


FAILED = Answer(0.0, 0.0, 4.0, (), Speculation(), "status 500: no")
ANSWERS = [answer(0.0, 0.5, 0.1, 11), answer(1.0, 0.3, 0.2, 11, queued_s=0.5), FAILED]


def test_the_names_are_vllms() -> None:
    assert set(serve_keys(ANSWERS, (99,), {})) == VLLM


def test_percentiles_are_named_by_their_number() -> None:
    keys = serve_keys(ANSWERS, (50, 99.9), {})
    assert {"p50_itl_ms", "p99.9_e2el_ms"} <= set(keys)


def test_throughput_counts_whole_answers_over_the_whole_time() -> None:
    keys = serve_keys(ANSWERS, (99,), {})
    assert (keys["duration"], keys["completed"], keys["failed"]) == (4.0, 2, 1)
    assert keys["request_throughput"] == 0.5
    assert keys["output_throughput"] == 22 / 4
    assert (keys["total_input_tokens"], keys["total_output_tokens"]) == (40, 22)
    assert keys["total_token_throughput"] == 62 / 4


def test_latencies_count_from_sending_and_what_waited_before_is_told_apart() -> None:
    keys = serve_keys(ANSWERS, (99,), {})
    assert keys["mean_ttft_ms"] == pytest.approx(400)
    assert keys["mean_tpot_ms"] == pytest.approx(150)
    assert keys["median_itl_ms"] == pytest.approx(150)
    assert keys["mean_e2el_ms"] == pytest.approx((1500 + 2300) / 2)
    assert keys["std_e2el_ms"] == pytest.approx(400)
    assert keys["p99_ttft_ms"] == pytest.approx(300 + 0.99 * 200)
    assert keys["mean_client_queue_time_ms"] == pytest.approx(250)


def test_time_per_token_counts_tokens_and_not_chunks() -> None:
    """Speculation sends several in a chunk: the gap between chunks is longer than the time of a token."""
    keys = serve_keys([answer(0.0, 0.2, 0.1, 11, counted=41)], (99,), {})
    assert keys["mean_tpot_ms"] == pytest.approx(25)
    assert keys["mean_itl_ms"] == pytest.approx(100)
    assert keys["total_output_tokens"] == 41


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 400.0}, 1),
        ({"tpot": 120.0}, 1),
        ({"ttft": 400.0, "tpot": 120.0}, 0),
        ({"ttft": 501.0, "tpot": 201.0}, 2),
        ({"e2el": 1600.0}, 1),
        ({"e2el": 1400.0}, 0),
    ],
)
def test_goodput_is_the_rate_of_answers_that_keep_every_limit(limits: dict[str, float], good: int) -> None:
    assert serve_keys(ANSWERS, (99,), limits)["request_goodput"] == good / 4


def test_without_limits_there_is_no_goodput() -> None:
    assert serve_keys(ANSWERS, (99,), {})["request_goodput"] is None


def test_one_token_has_no_time_per_token_and_keeps_every_limit_of_it() -> None:
    keys = serve_keys([answer(0.0, 0.5, 0.0, 1)], (99,), {"tpot": 1.0})
    assert keys["mean_tpot_ms"] == 0.0
    assert keys["request_goodput"] == 2.0


def test_a_server_that_counts_no_prompt_tokens_gives_none() -> None:
    keys = serve_keys([Answer(0.0, 0.0, 1.0, ((1.0, 1),), Speculation())], (99,), {})
    assert keys["total_input_tokens"] is None
    assert keys["total_token_throughput"] is None


def test_the_most_at_once_is_seen_between_the_ends() -> None:
    assert most_at_once([answer(0.0, 1.0, 0.0, 1), answer(1.0, 1.0, 0.0, 1)]) == 1
    assert most_at_once([answer(at, 1.0, 0.0, 1) for at in (0.0, 0.5, 0.9, 1.2)]) == 3


def test_the_lists_behind_the_figures() -> None:
    told = detailed(ANSWERS)
    assert told["input_lens"] == [20, 20, None]
    assert told["output_lens"] == [11, 11, 0]
    assert told["ttfts"] == pytest.approx([0.5, 0.3, 0.0])
    assert told["start_times"] == [0.0, 1.0, 0.0]
    assert told["errors"] == ["", "", "status 500: no"]
