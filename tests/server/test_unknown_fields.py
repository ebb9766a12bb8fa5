"""Unknown fields of requests: ignored and reported, or refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_serve.base.settings import Settings
from ssd_serve.server.errors import ApiError
from ssd_serve.server.limits import MAX_UNKNOWN_FIELDS
from ssd_serve.server.openai.protocol import ChatRequest, CompletionRequest
from ssd_serve.server.openai.unknown_fields import IGNORED_HEADER, UnknownFields, names_of
from tests.examples import examples
from tests.server.fakes import say
from tests.server.running_server import post, running_server

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "Hi"}]


async def test_unknown_fields_are_ignored_and_listed_in_header() -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}] * 2}],
        "session_id": "s",
        "stream": True,
        "stream_options": {"include_usage": True, "chunked": 1},
        "naïve, 1": None,
        "x" * 100_000: 1,
    }
    async with running_server(lambda _: say("x")) as server:
        answer = await server.http.post(CHAT, json=body)
        assert bytes(server.engine.submits()[0].prompt).decode() == "user: HiHi\nassistant: "
        known = await server.http.post("/detokenize", json={"tokens": [97]})
    assert IGNORED_HEADER not in known.headers
    assert answer.status_code == 200
    assert set(answer.headers[IGNORED_HEADER].split(",")) == {
        *("session_id", "stream_options.chunked", "messages.content.cache_control", "na%C3%AFve%2C%201"),
        "x" * 64,
    }


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("tempreature", "temperature"),
        ("maxTokens", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("repeat_penality", "repeat_penalty"),
    ],
)
async def test_misspelled_field_returns_400(written: str, meant: str) -> None:
    async with running_server(lambda _: say("x")) as server:
        answer = await server.http.post(COMPLETIONS, json={"prompt": "a", written: 1})
        assert server.engine.submits() == []
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, written, "unknown_field")
    assert error["message"].endswith(f"did you mean {meant}?")


async def test_llama_cpp_field_aliases() -> None:
    body = {"prompt": "a", "n_predict": 7, "repeat_penalty": 1.5, "return_tokens": True, "cache_prompt": True}
    async with running_server(lambda _: say("x")) as server:
        answer = await post(server, COMPLETIONS, **body)
        parameters = server.engine.submits()[0].parameters
        twice = await server.http.post(COMPLETIONS, json={**body, "max_tokens": 7})
    assert (parameters.max_tokens, parameters.repetition_penalty) == (7, 1.5)
    assert answer["choices"][0]["token_ids"]
    assert twice.status_code == 400
    assert "another name of max_tokens" in twice.json()["error"]["message"]


async def test_unsupported_samplers_return_400_unless_neutral() -> None:
    async with running_server(lambda _: say("x")) as server:
        await post(server, COMPLETIONS, prompt="a", typical_p=1.0, mirostat=0, xtc_probability=0)
        answer = await server.http.post(COMPLETIONS, json={"prompt": "a", "typical_p": 0.9})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "not_built"


@pytest.mark.parametrize("asked", ["max_tokens", "n_predict", "max_completion_tokens"])
async def test_max_tokens_minus_one_fills_context(asked: str) -> None:
    path, body = (CHAT, {"messages": ASK}) if "completion" in asked else (COMPLETIONS, {"prompt": "a"})
    async with running_server(lambda _: say("x")) as server:
        await post(server, path, **{**body, asked: -1})
        submit = server.engine.submits()[0]
        wrong = await server.http.post(path, json={**body, asked: -2})
    assert submit.parameters.max_tokens == 512 - len(submit.prompt)
    assert wrong.status_code == 400


async def test_strict_server_rejects_unknown_fields() -> None:
    wrong = [
        {"messages": ASK, "session_id": "s"},
        {"messages": [{**ASK[0], "id": "m"}]},
        {"messages": ASK, "stream": True, "stream_options": {"chunked": 1}},
    ]
    async with running_server(lambda _: say("x"), settings=Settings(strict_requests=True)) as server:
        codes = [(await server.http.post(CHAT, json=body)).json()["error"]["code"] for body in wrong]
        await post(server, CHAT, messages=ASK)
    assert codes == ["unknown_field"] * 3


async def test_too_many_unknown_fields_return_400() -> None:
    body = {"prompt": "a", **{f"zz{number}": 0 for number in range(MAX_UNKNOWN_FIELDS + 1)}}
    async with running_server(lambda _: say("x")) as server:
        answer = await server.http.post(COMPLETIONS, json=body)
    assert answer.status_code == 400
    assert "fields that are not known" in answer.json()["error"]["message"]


@settings(max_examples=examples(30))
@given(st.dictionaries(st.text(max_size=12), st.none(), max_size=4))
def test_every_unknown_field_is_listed_or_rejected(extra: dict[str, None]) -> None:
    known = {name for name, _ in names_of(CompletionRequest)}
    extra = {name: value for name, value in extra.items() if name not in known}
    body = CompletionRequest.model_validate({"prompt": "a", **extra})
    try:
        told = set(UnknownFields().ignored(body))
    except ApiError as error:
        told = {str(error.param)}
        extra = {name: value for name, value in extra.items() if name == error.param}
    assert told == set(extra)


def test_no_field_name_is_close_to_another() -> None:
    for kind in (CompletionRequest, ChatRequest):
        given_all = kind.model_construct(**dict.fromkeys(kind.model_fields))
        assert UnknownFields(strict=True).ignored(given_all) == ()
