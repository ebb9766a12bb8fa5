"""Answers that broke off go on behind the tokens that the client has, as if nothing had happened."""

import asyncio
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_serve.base.messages import Submit
from tests.examples import examples
from tests.server.fakes import END, Script, tokens
from tests.server.running_server import events, post, running_server

PATH = "/v1/completions"
TEXT = "To stop 🙂 or not to STOP"
IDS = [*TEXT.encode(), END]


def rest(submit: Submit) -> Script:
    assert list(submit.output) == IDS[: len(submit.output)]
    return tokens(IDS[len(submit.output) :], group=1)


async def chunks(**body: Any) -> list[tuple[str, list[int], str | None]]:
    async with running_server(rest) as server:
        found = await events(server, PATH, prompt="a", seed=5, return_token_ids=True, **body)
    return [
        (choice["text"], choice.get("token_ids") or [], choice["finish_reason"])
        for chunk in found
        for choice in chunk["choices"]
    ]


def joined(parts: list[tuple[str, list[int], str | None]]) -> tuple[str, list[int]]:
    return "".join(text for text, _, _ in parts), [token for _, ids, _ in parts for token in ids]


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(
    st.integers(1, len(IDS)),
    st.sampled_from([[], ["STOP"], ["stop 🙂 or not at all", " S"], ["not"], ["STOP it"]]),
    st.booleans(),
    st.sampled_from([60, 20]),
)
def test_resumed_output_completes_broken_stream(
    after: int, stops: list[str], include: bool, most: int
) -> None:
    body = {"stop": stops, "include_stop_str_in_output": include, "max_tokens": most}

    async def check() -> None:
        whole = await chunks(**body)
        # The connection breaks behind a chunk; the last one, which tells how it ended, never comes.
        had = whole[: min(after, len(whole) - 1)]
        rest_of_it = await chunks(generated_token_ids=[joined(had)[1]], **body)
        assert joined(had + rest_of_it) == joined(whole)
        assert rest_of_it[-1][2] == whole[-1][2]

    asyncio.run(check())


@pytest.mark.anyio
async def test_every_choice_resumes_behind_its_generated_tokens() -> None:
    messages = [{"role": "user", "content": "?"}]
    had = [IDS[:2], [], IDS[:5], IDS[:8]]
    body = {"prompt": ["a", "b"], "n": 2, "seed": 5, "max_tokens": 60, "logprobs": 0}
    async with running_server(rest) as server:
        whole = await post(server, PATH, **body)
        found = await post(server, PATH, generated_token_ids=had, **body)
        first, again = server.engine.submits()[:4], server.engine.submits()[4:]
        chat = await post(
            server, "/v1/chat/completions", messages=messages, seed=5, generated_token_ids=[IDS[:8]]
        )
    assert chat["choices"][0]["message"]["content"] == TEXT[8:]
    assert chat["usage"]["completion_tokens"] == len(IDS) - 8
    assert [each.seed for each in again] == [each.seed for each in first]
    assert [list(each.output) for each in again] == had
    for choice, ids, before in zip(found["choices"], had, whole["choices"], strict=True):
        assert choice["text"] == TEXT[len(ids) :]
        offsets = before["logprobs"]["text_offset"][len(ids) :]
        assert choice["logprobs"]["text_offset"] == [offset - len(ids) for offset in offsets]


@pytest.mark.anyio
async def test_invalid_generated_token_ids_return_400() -> None:
    had = [list(b"To stop")]
    async with running_server(rest) as server:
        for body, message in (
            ({"seed": None}, "needs the seed"),
            ({"n": 2}, "has 1 lists; the request has 2 choices"),
            ({"prompt": ["a", "b"]}, "has 1 lists; the request has 2 choices"),
            ({"generated_token_ids": [[999]]}, "outside the vocabulary"),
            ({"max_tokens": 6}, "7 tokens are more than the 6"),
            ({"generated_token_ids": [7]}, "valid array"),
        ):
            response = await server.http.post(
                PATH, json={"prompt": "a", "seed": 5, "generated_token_ids": had, **body}
            )
            assert response.status_code == 400
            assert message in response.json()["error"]["message"]
        assert server.engine.submits() == []
        again = await post(server, PATH, prompt="a", seed=5, max_tokens=60, generated_token_ids=[])
    assert again["choices"][0]["text"] == TEXT


@pytest.mark.anyio
async def test_generated_tokens_behind_stop_string_are_not_counted() -> None:
    body = {"prompt": "a", "seed": 5, "stop": ["not"], "max_tokens": 60}
    async with running_server(rest) as server:
        found = await post(server, PATH, generated_token_ids=[list(TEXT.encode())], **body)
        told = (await server.http.get("/metrics")).text
        assert server.engine.submits() == []
    assert (found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == ("", "stop")
    assert found["usage"]["completion_tokens"] == 0
    (summed,) = re.findall(r"^ssd_request_generation_tokens_sum(?:{.*})? (.*)$", told, re.MULTILINE)
    assert float(summed) == 0
