"""The server's end of the engine's channel: full queues, nonsense, late reports, the end."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ssd_serve.base.draft_messages import PROTOCOL_VERSION, Heartbeat, Message
from ssd_serve.base.errors import EngineDeadError, OverloadedError, RequestError
from ssd_serve.base.messages import (
    Abort,
    Choice,
    Committed,
    Figures,
    Finished,
    RequestOptions,
    SamplingParameters,
    Submit,
    SubmitChoices,
)
from ssd_serve.bench.memory_channel import MemoryChannel, memory_pair
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.engine.inflight import MAX_TOKENS, InflightRequest, Report, group_choices
from tests.server.fakes import READY, channel_pair, submit

pytestmark = pytest.mark.anyio
PARAMETERS = SamplingParameters()
OPTIONS = RequestOptions(salt=b"salt", priority=2)


async def drain(client: EngineClient) -> None:
    connection = client._connection  # pyright: ignore[reportPrivateUsage]
    assert connection is not None
    connection.drain()
    await asyncio.sleep(0)


def pair(capacity: int = 100) -> tuple[EngineClient, MemoryChannel]:
    ours, theirs = memory_pair(capacity=capacity)
    client = EngineClient(ours)
    client.start()
    return client, theirs


async def test_reports_reach_submitter_until_request_ends() -> None:
    client, engine = pair()
    first: list[Report] = []
    second: list[Report] = []
    one = submit(client, (1,), PARAMETERS, 7, first.append)
    two = submit(client, (2,), PARAMETERS, 8, second.append)
    assert one != two
    for message in (Committed(one, (5,)), Committed(two, (6,)), Finished(one, "stop", Figures())):
        engine.send(message)
    for late in (Committed(one, (9,)), Finished(one, "stop", Figures()), Committed(99, (9,)), Heartbeat()):
        engine.send(late)
    await drain(client)
    assert [type(report) for report in first] == [Committed, Finished]
    assert [type(report) for report in second] == [Committed]
    assert client.active == 1
    client.stop()


async def test_aborted_request_gets_no_report_and_finished_one_its_end() -> None:
    client, engine = pair()
    heard: list[Report] = []
    finished: list[Report] = []
    requests = [submit(client, (1,), PARAMETERS, 7, deliver.append) for deliver in (heard, finished)]
    client.abort(requests[0])
    client.finish(requests[1])
    client.abort(requests[0])
    for request in requests:
        engine.send(Finished(request, "stop", Figures(rounds=3)))
    await drain(client)
    assert heard == []
    assert finished == [Finished(requests[1], "stop", Figures(rounds=3))]
    client.finish(requests[1])
    sent = [type(message).__name__ for message in engine.receive()]
    assert sent == ["Submit", "Submit", "Abort", "Finish"]
    client.stop()


async def test_full_send_queue_rejects_requests_but_keeps_aborts() -> None:
    client, engine = pair(capacity=2)
    requests = [submit(client, (1,), PARAMETERS, 7, lambda _: None) for _ in range(2)]
    with pytest.raises(OverloadedError):
        submit(client, (1,), PARAMETERS, 7, lambda _: None)
    for request in requests:
        client.abort(request)
    arrived: list[Message] = []
    for _ in range(100):
        arrived += engine.receive()
        if len(arrived) == 4:
            break
        await asyncio.sleep(0.01)
    assert [message for message in arrived if isinstance(message, Abort)] == [Abort(1), Abort(2)]
    client.stop()


async def test_choices_of_one_prompt_share_a_message() -> None:
    client, engine = pair()
    prompt, heard = tuple(range(50)), [list[Report]() for _ in range(3)]
    requests = [
        InflightRequest(Submit(1 + seed, prompt, PARAMETERS, seed, (4,) * seed, options=OPTIONS), each.append)
        for seed, each in enumerate(heard)
    ]
    other = Submit(4, (1,), PARAMETERS, 9, options=OPTIONS)
    client.submit([*requests, InflightRequest(other, lambda _: None)])
    together, single = engine.receive()
    assert together == SubmitChoices(
        prompt,
        PARAMETERS,
        tuple(Choice(1 + seed, seed, (4,) * seed) for seed in range(3)),
        OPTIONS,
    )
    assert single == other
    engine.send(Finished(2, "stop", Figures()))
    await drain(client)
    assert [len(each) for each in heard] == [0, 1, 0]
    client.stop()


async def test_submit_is_atomic_and_too_many_tokens_are_rejected() -> None:
    ours, theirs = channel_pair()
    client = EngineClient(ours)
    client.start()
    prompts = [(70_000 + number,) * 600_000 for number in range(3)]
    submits = [
        Submit(client.next_number(), prompt, PARAMETERS, seed) for prompt in prompts for seed in range(4)
    ]
    client.submit([InflightRequest(each, lambda _: None) for each in submits])
    with pytest.raises(OverloadedError):
        submit(client, (1,), PARAMETERS, 7, lambda _: None)
    with pytest.raises(RequestError, match="tokens"):
        submit(client, (1,) * (MAX_TOKENS + 1), PARAMETERS, 7, lambda _: None)
    arrived: list[Message] = []
    for _ in range(500):
        arrived += theirs.receive()
        if len(arrived) == 3:
            break
        await asyncio.sleep(0.002)
    assert [each.prompt for each in arrived if isinstance(each, SubmitChoices)] == prompts
    client.stop()
    theirs.close()


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, MAX_TOKENS // 2)), max_size=9))
def test_grouped_messages_keep_requests_within_max_tokens(asked: list[tuple[int, int, int]]) -> None:
    prompts, kinds = ((1,) * 1000, (2,) * 1000), (PARAMETERS, SamplingParameters(top_k=3))
    outputs = {length: (0,) * length for _, _, length in asked}
    submits = [
        Submit(number, prompts[which], kinds[kind], number, outputs[length])
        for number, (which, kind, length) in enumerate(asked)
    ]
    messages = group_choices(submits)
    apart = [
        each
        for message in messages
        for each in (message.each() if isinstance(message, SubmitChoices) else [message])
    ]
    assert apart == submits
    for message in messages:
        if isinstance(message, SubmitChoices):
            outputs_size = sum(len(each.output) for each in message.choices)
            assert len(message.prompt) + outputs_size <= MAX_TOKENS


async def test_malformed_message_ends_engine_and_all_requests() -> None:
    client, engine = pair()
    heard: list[Report] = []
    submit(client, (1,), PARAMETERS, 7, heard.append)
    engine.send_raw(b"GET / HTTP/1.1\r\n\r\n" * 10)
    await drain(client)
    assert isinstance(heard[0], EngineDeadError)
    assert client.dead is not None
    with pytest.raises(EngineDeadError):
        submit(client, (1,), PARAMETERS, 7, heard.append)


async def test_engine_exit_is_noticed_through_socket() -> None:
    ours, theirs = channel_pair()
    client = EngineClient(ours)
    client.start()
    heard: asyncio.Queue[Report] = asyncio.Queue()
    theirs.send(READY)
    submit(client, (1,), PARAMETERS, 7, heard.put_nowait)
    theirs.close()
    assert isinstance(await asyncio.wait_for(heard.get(), 5.0), EngineDeadError)
    assert client.ready == READY


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
async def test_protocol_version_mismatch_is_rejected(version: int) -> None:
    client, engine = pair()
    engine.send(replace(READY, protocol=version))
    await drain(client)
    assert client.ready is None
    assert client.dead is not None
    assert f"server {PROTOCOL_VERSION}, verifier {version}" in client.dead
    assert "install the same version" in client.dead
    with pytest.raises(EngineDeadError, match="protocol versions differ"):
        submit(client, (1,), PARAMETERS, 7, lambda _report: None)
