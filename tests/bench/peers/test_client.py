"""Answers of every engine become the same sample: what is timed, what is counted, what is refused."""

import json

import pytest

from ssd_serve.bench.peers.client import Ask, Event, PeerError, body, draft_counters, read_answer
from ssd_serve.bench.peers.engines import read_steps

ASK = Ask((1, 2, 3), 5, 0.0, 7)


def event(at: float, **fields: object) -> Event:
    return Event(at, json.dumps({"object": "text_completion", "model": "m", **fields}).encode())


def text(at: float, value: str, ids: list[int] | None = None, **fields: object) -> Event:
    choice: dict[str, object] = {"index": 0, "text": value, "finish_reason": None}
    return event(at, choices=[choice | ({} if ids is None else {"token_ids": ids})], **fields)


def usage(at: float, tokens: int = 5, **fields: object) -> Event:
    return event(at, choices=[], usage={"prompt_tokens": 3, "completion_tokens": tokens}, **fields)


DONE = Event(9.0, b"[DONE]")


def test_llama_cpp_sends_a_token_an_event_and_tells_its_drafts_at_the_end() -> None:
    timings = {"predicted_n": 5, "predicted_ms": 12.5, "draft_n": 6, "draft_n_accepted": 3}
    tokens = [text(0.5 + 0.1 * index, "x") for index in range(5)]
    sample = read_answer([*tokens, text(1.0, ""), usage(1.2, timings=timings), DONE], ASK)
    assert (sample.tokens, sample.counted, sample.drafted, sample.accepted) == (5, 4, 6, 3)
    assert sample.first_s == pytest.approx(0.5)
    assert sample.step_s == pytest.approx(0.4 / 4)
    assert sample.whole_s == pytest.approx(0.9)
    assert (sample.ids, sample.text) == ((), "xxxxx")


def test_llama_cpp_without_drafts_leaves_their_fields_out() -> None:
    timings = {"predicted_n": 5, "predicted_ms": 12.5}
    sample = read_answer([text(0.5, "x"), text(0.9, "y"), usage(1.2, timings=timings), DONE], ASK)
    assert (sample.drafted, sample.accepted) == (0, 0)


def test_this_engine_sends_several_tokens_an_event() -> None:
    speculation = {
        "num_spec_steps": 2,
        "num_draft_tokens": 8,
        "num_accepted_draft_tokens": 3,
        "cache_hits": 1,
    }
    metrics = {"speculative_decoding": speculation}
    events = [
        event(0.1, choices=[], seed=7),
        text(0.2, "a", [4, 5]),
        text(0.4, "", [6]),
        text(0.5, "b", [7, 8], metrics=metrics),
        usage(0.6, metrics=metrics),
        DONE,
    ]
    sample = read_answer(events, ASK)
    assert (sample.counted, sample.drafted, sample.accepted) == (3, 8, 3)
    assert sample.first_s == pytest.approx(0.2)
    assert sample.decode_s == pytest.approx(0.3)
    assert (sample.ids, sample.text) == ((4, 5, 6, 7, 8), "")


def test_figures_that_a_server_does_not_know_count_as_none() -> None:
    metrics = {"speculative_decoding": {"num_draft_tokens": None, "num_accepted_draft_tokens": 3}}
    sample = read_answer([text(0.1, "a", [4]), text(0.2, "b", [5]), usage(0.3, metrics=metrics)], ASK)
    assert sample.drafted == 0


def test_an_answer_of_another_length_is_refused() -> None:
    with pytest.raises(PeerError, match="4 tokens instead of 5"):
        read_answer([text(0.1, "a"), text(0.2, "b"), usage(0.3, tokens=4), DONE], ASK)


def test_an_answer_in_one_piece_is_refused() -> None:
    with pytest.raises(PeerError, match="one piece"):
        read_answer([text(0.1, "abcde"), usage(0.3), DONE], ASK)


@pytest.mark.parametrize("data", [b"{", b'{"choices": 3}'])
def test_what_is_not_understood_is_shown(data: bytes) -> None:
    with pytest.raises(PeerError, match="not understood"):
        read_answer([Event(0.1, data)], ASK)


def test_an_error_inside_a_stream_is_told() -> None:
    with pytest.raises(PeerError, match="out of slots"):
        read_answer([event(0.1, error={"message": "out of slots"})], ASK)


def test_the_request_is_the_same_for_all_but_for_the_extra_fields() -> None:
    request = body(ASK, {"cache_prompt": False})
    assert request["prompt"] == [1, 2, 3]
    assert (request["max_tokens"], request["ignore_eos"], request["stream"]) == (5, True, True)
    assert request["cache_prompt"] is False


def test_vllm_counts_on_its_metrics_page() -> None:
    page = "\n".join(
        (
            "# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.",
            "# TYPE vllm:spec_decode_num_draft_tokens_total counter",
            'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a b"} 120.0',
            'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a b"} 80.0',
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 40.0',
        )
    )
    assert draft_counters(page) == (120, 80)
    assert draft_counters("") == (0, 0)


def test_a_step_of_transformers_commits_one_token_of_the_targets_own() -> None:
    told = {"counts": [2, 4, 5], "seconds": [0.5, 0.6, 0.7], "drafted": 6, "text": [1, 2, 3, 4, 5]}
    line = json.dumps(told).encode()
    sample = read_steps(line, ASK)
    assert (sample.tokens, sample.counted, sample.drafted, sample.accepted) == (5, 3, 6, 2)
    assert sample.step_s == pytest.approx(0.2 / 3)
    assert sample.ids == (1, 2, 3, 4, 5)


def test_a_short_answer_of_transformers_is_refused() -> None:
    with pytest.raises(PeerError, match="3 tokens instead of 5"):
        read_steps(b'{"counts": [1, 2, 3], "seconds": [0.1, 0.2, 0.3], "drafted": 0}', ASK)
