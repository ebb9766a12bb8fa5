"""Answers that broke off go on behind the tokens that the client has, as if nothing had happened."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_serve.messages import Submit
from tests.server.fakes import END, Script, tokens
from tests.server.houses import House, events, open_house, post

PATH = "/v1/completions"
TEXT = "To stop 🙂 or not to STOP"
IDS = [*TEXT.encode(), END]


def rest(submit: Submit) -> Script:
    """What a real engine would give behind the output that a request has already."""
    assert list(submit.output) == IDS[: len(submit.output)]
    return tokens(IDS[len(submit.output) :], group=2)


async def answer(**body: Any) -> tuple[str, list[int], str]:
    """Text, tokens and finish reason."""
    async with open_house(rest) as house:
        chunks = await events(house, PATH, prompt="a", max_tokens=60, seed=5, return_token_ids=True, **body)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ids = [token for choice in choices for token in choice.get("token_ids", ())]
    return "".join(choice["text"] for choice in choices), ids, str(choices[-1]["finish_reason"])


async def broken_off(after: int, **body: Any) -> str:
    """The text that a client has of so many tokens."""
    async with open_house(lambda _: tokens(IDS[:after], group=1)) as house:
        chunks = await events(house, PATH, prompt="a", max_tokens=60, **body)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] for choice in choices if choice["finish_reason"] is None)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, len(IDS) - 2), st.sampled_from([[], ["STOP"], ["stop 🙂 or not at all", " S"]]))
def test_both_parts_together_are_the_whole(after: int, stops: list[str]) -> None:
    async def check() -> None:
        whole = await answer(stop=stops)
        had = await broken_off(after, stop=stops)
        text, ids, reason = await answer(stop=stops, generated_token_ids=IDS[:after])
        assert (had + text, IDS[:after] + ids, reason) == whole

    if not stops or after <= TEXT.encode().find(b" S"):
        asyncio.run(check())


@pytest.mark.anyio
async def test_chats_go_on_too_and_only_what_is_new_is_counted() -> None:
    async with open_house(rest) as house:
        messages = [{"role": "user", "content": "?"}]
        found = await post(
            house, "/v1/chat/completions", messages=messages, seed=5, generated_token_ids=IDS[:8]
        )
        (submit,) = house.engine.submits()
    assert found["choices"][0]["message"]["content"] == TEXT[8:]
    assert found["usage"]["completion_tokens"] == len(IDS) - 8
    assert submit.output == tuple(IDS[:8])


async def refusal(house: House, **body: Any) -> tuple[str, str]:
    response = await house.http.post(PATH, json={"prompt": "a", "seed": 5, **body})
    assert response.status_code == 400
    error = response.json()["error"]
    return error["code"], error["message"]


@pytest.mark.anyio
async def test_what_cannot_go_on_is_refused_with_a_reason() -> None:
    had = list(b"To stop")
    async with open_house(rest) as house:
        for body, code, message in (
            ({"seed": None}, "invalid_value", "needs the seed"),
            ({"n": 2}, "invalid_value", "only one choice"),
            ({"prompt": ["a", "b"]}, "invalid_value", "only one choice"),
            ({"echo": True}, "invalid_value", "echo"),
            ({"generated_token_ids": [999]}, "invalid_value", "outside the vocabulary"),
            ({"max_tokens": 7}, "answer_complete", "as many as the answer may have (7)"),
            ({"generated_token_ids": [*had, END]}, "answer_complete", f"token {END} ends it"),
            ({"stop": "stop"}, "answer_complete", "stop string 'stop' ends it"),
        ):
            found_code, found_message = await refusal(house, **{"generated_token_ids": had, **body})
            assert (found_code, message in found_message) == (code, True), found_message
        assert house.engine.submits() == []
        again = await post(house, PATH, prompt="a", seed=5, max_tokens=60, generated_token_ids=[])
    assert again["choices"][0]["text"] == TEXT
