"""Stop strings through the whole server: any grouping of tokens gives the same answer."""

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_serve.base.messages import Abort, Finish
from tests.server.fakes import END, Script, say
from tests.server.running_server import events, post, running_server

PATH = "/v1/completions"
TEXT = "To stop 🙂 or not to STOP"
STOPS = st.lists(st.sampled_from(["stop", "st", "🙂 or", "o n", " ", "P", "none"]), min_size=1, max_size=3)


@st.composite
def groupings(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    ids = [*TEXT.encode(), END]
    cuts = sorted(draw(st.sets(st.integers(1, len(ids) - 1), max_size=12)))
    edges = [0, *cuts, len(ids)]
    return tuple(tuple(ids[a:b]) for a, b in itertools.pairwise(edges))


async def outcome(groups: tuple[tuple[int, ...], ...], **body: Any) -> tuple[object, ...]:
    async with running_server(lambda _: Script(groups)) as server:
        found = await post(server, PATH, prompt="a", max_tokens=60, return_token_ids=True, logprobs=0, **body)
    choice = found["choices"][0]
    told = choice["logprobs"]
    return (
        choice["text"],
        choice["finish_reason"],
        choice["stop_reason"],
        choice["token_ids"],
        found["usage"],
        told["tokens"],
        told["text_offset"],
    )


@pytest.mark.slow
@settings(max_examples=25)
@given(groupings(), STOPS, st.booleans())
def test_stop_strings_are_independent_of_token_grouping(
    groups: tuple[tuple[int, ...], ...], stops: list[str], include: bool
) -> None:
    singly = tuple((token,) for group in groups for token in group)
    body = {"stop": stops, "include_stop_str_in_output": include}
    assert asyncio.run(outcome(groups, **body)) == asyncio.run(outcome(singly, **body))


@pytest.mark.anyio
async def test_tokens_behind_stop_string_are_hidden_and_uncounted() -> None:
    async with running_server(lambda _: say("one two three", group=100, hold_after=1)) as server:
        found = await post(server, PATH, prompt="a", stop=" two", return_token_ids=True)
        streamed = await events(server, PATH, prompt="a", stop=[" two"])
        server.engine.wait_for(lambda: len(server.engine.sent(Finish)) == 2)
        assert server.engine.sent(Abort) == []
        last = await post(
            server, PATH, prompt="a", stop=" two", max_tokens=7
        )  # the engine ends in that round
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["metrics"]["speculative_decoding"]["num_draft_tokens"] == 32
    choice = found["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one", "stop", " two")
    assert choice["token_ids"] == list(b"one two")
    assert found["usage"]["completion_tokens"] == 7
    assert found["metrics"]["speculative_decoding"]["num_draft_tokens"] == 32
    assert streamed[-1]["metrics"]["speculative_decoding"]["cache_hit_rate"] == 0.75
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == "one"


@pytest.mark.anyio
async def test_stop_string_without_engine_statistics_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd_serve.server.engine.generation._FIGURES_TIMEOUT_S", 0.05)
    async with running_server(lambda _: say("one two three", group=7, hold_after=1)) as server:
        server.engine.mute = True
        found = await post(server, PATH, prompt="a", stop="two")
        server.engine.wait_for(lambda: len(server.engine.sent(Abort)) == 1)
        assert server.client.active == 0
    assert found["choices"][0]["text"] == "one "
    figures = found["metrics"]["speculative_decoding"]
    assert (figures["num_tokens"], figures["num_draft_tokens"]) == (7, None)
    assert (figures["acceptance_histogram"], figures["sources"]) == (None, None)


@pytest.mark.anyio
async def test_stopped_text_survives_engine_crash() -> None:
    async with running_server(lambda _: say("one two three", group=7, hold_after=1)) as server:
        server.engine.mute = True
        asking = asyncio.ensure_future(post(server, PATH, prompt="a", stop="two"))
        await asyncio.to_thread(server.engine.wait_for, lambda: len(server.engine.sent(Finish)) == 1)
        await asyncio.to_thread(server.engine.die)
        found = await asking
    assert found["choices"][0]["text"] == "one "
