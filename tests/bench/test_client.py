"""Tests of the load client: token counts, concurrency, and detection of incomplete answers."""

import asyncio
import time
from collections.abc import Sequence

import pytest

from ssd_serve.bench.client import (
    Answer,
    Endpoint,
    LoadClient,
    LoadRequest,
    Recording,
    Speculation,
    read,
)
from tests.bench.fake_api import FakeApi, event, figures


def wanted(count: int, tokens: int = 9, gap_s: float = 0.0) -> list[LoadRequest]:
    return [LoadRequest((1, 2, 3), tokens, seed, at_s=seed * gap_s) for seed in range(count)]


def closed_loop(api: FakeApi, requests: Sequence[LoadRequest], concurrency: int) -> list[Answer]:
    async def run() -> list[Answer]:
        async with LoadClient(Endpoint("http://load", 0.5, "key"), api.transport) as client:
            return await client.closed_loop(requests, concurrency)

    return asyncio.run(run())


def test_a_request_asks_for_exactly_its_tokens() -> None:
    api = FakeApi()
    closed_loop(api, wanted(1), 1)
    assert api.bodies == [
        {
            "prompt": [1, 2, 3],
            "max_tokens": 9,
            "seed": 0,
            "temperature": 0.5,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
    ]
    assert api.headers[0]["authorization"] == "Bearer key"


def test_tokens_and_figures_of_an_answer() -> None:
    (answer,) = closed_loop(FakeApi(chunks=(1, 3)), wanted(1, tokens=9), 1)
    assert answer.error == ""
    assert [count for _, count in answer.arrivals] == [1, 3, 1, 3, 1]
    assert answer.tokens == 9
    assert answer.speculation == Speculation(4, 9, 4, 40, 4, 0)
    assert answer.sent_s <= answer.arrivals[0][0] <= answer.arrivals[-1][0] <= answer.ended_s


def test_the_closed_loop_keeps_its_concurrency_and_sends_everything_once() -> None:
    api = FakeApi(pause_s=0.001)
    answers = closed_loop(api, wanted(10), 3)
    assert api.max_running == 3
    assert sorted(body["seed"] for body in api.bodies) == list(range(10))
    assert [answer.error for answer in answers] == [""] * 10
    assert api.running == 0


def test_the_open_loop_sends_in_time_whatever_is_running() -> None:
    api = FakeApi(pause_s=0.02)

    async def run() -> list[Answer]:
        async with LoadClient(Endpoint("http://load", 1.0), api.transport) as client:
            return await client.open_loop(wanted(5, gap_s=0.01))

    answers = asyncio.run(run())
    assert api.max_running > 1
    assert [round(answer.due_s - answers[0].due_s, 6) for answer in answers] == [0, 0.01, 0.02, 0.03, 0.04]
    assert all(answer.sent_s >= answer.due_s for answer in answers)
    assert [body["seed"] for body in api.bodies] == [0, 1, 2, 3, 4]


def test_latencies_count_from_sending() -> None:
    answer = Answer(10.0, 10.5, 12.5, ((11.0, 1), (11.5, 2), (12.0, 2)), Speculation())
    assert (answer.ttft_s, answer.latency_s) == (0.5, 1.5)
    assert answer.tpot_s == 0.25
    assert Answer(0.0, 0.0, 1.0, ((1.0, 1),), Speculation()).tpot_s is None


def test_a_refusal_is_an_error_and_has_no_tokens() -> None:
    (answer,) = closed_loop(FakeApi(status=429), wanted(1), 1)
    assert answer.tokens == 0
    assert answer.error.startswith("status 429")
    assert "too many requests" in answer.error


def test_a_stream_that_is_cut_is_not_whole() -> None:
    api = FakeApi(chunks=(1,))
    api.cut_after = 4
    (answer,) = closed_loop(api, wanted(1, tokens=9), 1)
    assert answer.error == "the stream ended after 4 of 9 tokens"
    assert answer.tokens == 4


@pytest.mark.parametrize("cut", [1, 7, 39])
def test_chunks_count_when_their_end_arrives(cut: int) -> None:
    first = event({"choices": [{"token_ids": [1]}]})
    rest = (
        event({"choices": [{"token_ids": [2, 3]}], "metrics": figures(1, 3)}) + b": ping\n\ndata: [DONE]\n\n"
    )
    recording = Recording(LoadRequest((1,), 3, 0), 1.0, 1.0, 5.0)
    recording.reads = [(2.0, first[:cut]), (3.0, first[cut:]), (4.0, rest)]
    answer = read(recording)
    assert answer.error == ""
    assert answer.arrivals == ((3.0 if cut < len(first) else 2.0, 1), (4.0, 2))


def test_text_that_was_held_back_is_no_further_token() -> None:
    recording = Recording(LoadRequest((1,), 2, 0), 1.0, 1.0, 5.0)
    events = [{"text": "a", "token_ids": [1]}, {"text": "", "token_ids": [2]}, {"text": "rest"}]
    recording.reads = [(2.0 + at, event({"choices": [one]})) for at, one in enumerate(events)]
    recording.reads.append((5.0, b"data: [DONE]\n\n"))
    answer = read(recording)
    assert (answer.error, answer.arrivals) == ("", ((2.0, 1), (3.0, 1)))


def test_an_error_event_makes_an_answer_an_error() -> None:
    recording = Recording(LoadRequest((1,), 1, 0))
    recording.reads = [(1.0, event({"choices": [{"token_ids": [1]}]}))]
    recording.reads.append((2.0, event({"error": {"message": "the engine is gone"}})))
    assert read(recording).error == "the engine is gone"


def test_cancelling_keeps_what_has_come() -> None:
    api = FakeApi(chunks=(2,), pause_s=0.005)
    recording = Recording(LoadRequest((1,), 1000, 0))

    async def run() -> None:
        async with LoadClient(Endpoint("http://load", 1.0), api.transport) as client:
            task = asyncio.create_task(client.record(recording))
            while not any(b"token_ids" in data for _, data in recording.reads[3:]):
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    answer = read(recording)
    assert 0 < answer.tokens < 1000
    assert answer.error
    assert answer.ended_s <= time.perf_counter()
