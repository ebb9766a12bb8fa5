"""Tests of the load client: bodies, token counts, and detection of incomplete answers."""

import asyncio
import json
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from ssd_serve.bench.client import Answer, Endpoint, LoadRequest, Recording, open_client, read, record

DONE = b"data: [DONE]\n\n"


def event(value: dict[str, object]) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def recorded(tokens: int, *reads: tuple[float, bytes]) -> Answer:
    recording = Recording(LoadRequest((1,), tokens, 0), 1.0, 1.0, 5.0)
    recording.reads = list(reads)
    return read(recording)


def test_request_body_and_key() -> None:
    assert Endpoint("", 0.5).body(LoadRequest((1, 2, 3), 9, 0)) == {
        "prompt": [1, 2, 3],
        "max_tokens": 9,
        "seed": 0,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    assert open_client("http://load", "key").headers["authorization"] == "Bearer key"


def test_latencies_count_from_sending() -> None:
    answer = Answer(10.0, 10.5, 12.5, ((11.0, 1), (11.5, 2), (12.0, 2)))
    assert (answer.ttft_s, answer.latency_s) == (0.5, 1.5)
    assert answer.tpot_s == 0.25
    assert Answer(0.0, 0.0, 1.0, ((1.0, 1),)).tpot_s is None


@pytest.mark.parametrize("cut", [1, 7, 39])
def test_split_chunks_arrive_with_their_last_byte(cut: int) -> None:
    first = event({"choices": [{"token_ids": [1]}]})
    rest = event({"choices": [{"token_ids": [2, 3]}]}) + b": ping\n\n" + DONE
    answer = recorded(3, (2.0, first[:cut]), (3.0, first[cut:]), (4.0, rest))
    assert answer.error == ""
    assert answer.arrivals == ((3.0 if cut < len(first) else 2.0, 1), (4.0, 2))


def test_text_without_token_ids_adds_no_token() -> None:
    events = [{"text": "a", "token_ids": [1]}, {"text": "", "token_ids": [2]}, {"text": "rest"}]
    reads = [(2.0 + at, event({"choices": [one]})) for at, one in enumerate(events)]
    answer = recorded(2, *reads, (5.0, DONE))
    assert (answer.error, answer.arrivals) == ("", ((2.0, 1), (3.0, 1)))


def test_incomplete_answers_have_an_error() -> None:
    one = (1.0, event({"choices": [{"token_ids": [1]}]}))
    assert recorded(1, one).error == "the stream ended after 1 of 1 tokens"
    assert recorded(9, one, (2.0, DONE)).error == "the stream ended after 1 of 9 tokens"
    failed = recorded(1, one, (2.0, event({"error": {"message": "the engine is gone"}})))
    assert failed.error == "the engine is gone"


class Endless(httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            yield event({"choices": [{"token_ids": [7, 7]}]})
            await asyncio.sleep(0.001)


def test_cancelled_request_keeps_its_tokens() -> None:
    recording = Recording(LoadRequest((1,), 1000, 0))

    async def run() -> None:
        transport = httpx.MockTransport(lambda _request: httpx.Response(200, stream=Endless()))
        async with open_client("http://load", transport=transport) as http:
            task = asyncio.create_task(record(http, Endpoint("", 1.0), recording))
            while len(recording.reads) < 3:
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    answer = read(recording)
    assert 0 < answer.tokens < 1000
    assert answer.error
    assert answer.ended_s <= time.perf_counter()
