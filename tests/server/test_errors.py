"""Invalid requests get an error in OpenAI's format that names the field."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from ssd_serve.base.settings import Settings
from ssd_serve.server.limits import Limits
from tests.server.fakes import CONTEXT, END, VOCABULARY, ByteDetokenizer, ByteTokenizer, say
from tests.server.running_server import RunningServer, post, running_server

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "Hi"}]

# (fields of the body, the field that the error names)
WRONG_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt.0"),
    ({"prompt": [1, "a"]}, "prompt.1"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt.0"),
    ({"prompt": [VOCABULARY]}, "prompt"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "temperature": True}, "temperature"),
    ({"prompt": "a", "temperature": 1e-30}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "min_p": 2}, "min_p"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "top_k": 1.5}, "top_k"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": ["a"] * 100, "n": 2}, "n"),
    ({"prompt": ["a"] * 300}, "prompt"),
    ({"prompt": "a", "max_tokens": -2}, "max_tokens"),
    ({"prompt": "a", "max_tokens": CONTEXT}, "max_tokens"),
    ({"prompt": [97] * CONTEXT}, "prompt"),
    ({"prompt": "a", "min_tokens": 17}, "min_tokens"),
    ({"prompt": "a", "seed": 2**64}, "seed"),
    ({"prompt": "a", "seed": 1.5}, "seed"),
    ({"prompt": "a", "stop": 5}, "stop"),
    ({"prompt": "a", "stop": ["a"] * 17}, "stop"),
    ({"prompt": "a", "stop": ["a", ""]}, "stop.1"),
    ({"prompt": "a", "stop_token_ids": [VOCABULARY]}, "stop_token_ids"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"prompt": "a", "logit_bias": {"97": 101}}, "logit_bias.97"),
    ({"prompt": "a", "logit_bias": {str(VOCABULARY): 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(3000)}}, "logit_bias"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "echo"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "stream_options": {}}, "stream_options"),
    (
        {"prompt": "a", "stream": True, "stream_options": {"include-usage": True}},
        "stream_options.include-usage",
    ),
    ({"prompt": "a", "best_of": 2, "n": 3}, "best_of"),
    ({"prompt": "a", "request_id": "two words"}, "request_id"),
    ({"prompt": "a", "request_id": "a" * 129}, "request_id"),
    ({"prompt": "a", "suffix": "end"}, "suffix"),
    ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
    ({"prompt": "a", "allowed_token_ids": [VOCABULARY]}, "allowed_token_ids"),
    ({"prompt": "a", "allowed_token_ids": [97] * 4097}, "allowed_token_ids"),
    ({"prompt": "a", "allowed_token_ids": [97], "bad_words": ["a"]}, "allowed_token_ids"),
    ({"prompt": "a", "allowed_token_ids": [END], "min_tokens": 1}, "allowed_token_ids"),
    ({"prompt": "a", "bad_words": ["a", ""]}, "bad_words.1"),
    ({"prompt": "a", "bad_words": ["  "]}, "bad_words"),
    ({"prompt": "a", "bad_words": ["a"] * 129}, "bad_words"),
    ({"prompt": "a", "bad_words": ["a" * 257]}, "bad_words.0"),
    ({"prompt": "a", "tempreature": 1}, "tempreature"),
    ({"prompt": "a", "messages": ASK}, "messages"),
    ({}, "prompt"),
]
WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
        "messages.0.tool_calls.0.function",
    ),
    ({"messages": ASK, "tools": [{"type": "function"}]}, "tools.0.function"),
    ({"messages": ASK, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"messages": ASK, "audio": {}}, "audio"),
    ({"messages": ASK, "modalities": ["text", "audio"]}, "modalities"),
    ({"messages": ASK, "chat_template": "{{ 1 }}"}, "chat_template"),
    ({"messages": ASK, "logprobs": 5}, "logprobs"),
    ({"messages": ASK, "top_logprobs": 5}, "top_logprobs"),
    ({"messages": ASK, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"messages": ASK, "max_completion_tokens": CONTEXT}, "max_completion_tokens"),
    ({"messages": [{"role": "user", "content": "a" * CONTEXT}]}, "messages"),
    ({"messages": ASK, "prompt": "x"}, "prompt"),
]


async def assert_refused(server: RunningServer, path: str, body: dict[str, Any], param: str) -> str:
    answer = await server.http.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert param.split(".")[0] in error["message"]
    return str(error["code"])


async def test_invalid_fields_are_named_in_the_error() -> None:
    async with running_server(lambda _: say("fine")) as server:
        for body, param in WRONG_COMPLETIONS:
            await assert_refused(server, COMPLETIONS, body, param)
        for body, param in WRONG_CHATS:
            await assert_refused(server, CHAT, body, param)
        assert server.engine.submits() == []
        assert (await post(server, COMPLETIONS, prompt="a"))["choices"][0]["text"] == "fine"


async def test_error_codes_of_unknown_and_unsupported_fields() -> None:
    async with running_server(lambda _: say("x")) as server:
        wrong = {"messages": ASK, "top-p": 1}
        assert await assert_refused(server, CHAT, wrong, "top-p") == "unknown_field"
        assert await assert_refused(server, CHAT, {"messages": ASK, "store": True}, "store") == "not_built"
        assert await assert_refused(server, COMPLETIONS, {}, "prompt") == "missing_field"


async def test_context_length_error_has_the_numbers() -> None:
    async with running_server(lambda _: say("x")) as server:
        answer = await server.http.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 600})
    message = answer.json()["error"]["message"]
    assert "600 output tokens and 4 prompt tokens are 604" in message
    assert str(CONTEXT) in message


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'"prompt"',
        b"null",
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 5000,
        b'{"prompt": ' + b"[" * 150 + b"]" * 150 + b"}",
    ],
)
async def test_invalid_json_is_a_400(raw: bytes) -> None:
    async with running_server(lambda _: say("x")) as server:
        answer = await server.http.post(
            COMPLETIONS, content=raw, headers={"Content-Type": "application/json"}
        )
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_large_body_is_a_413_with_and_without_content_length() -> None:
    async def parts() -> AsyncGenerator[bytes, None]:
        for _ in range(10):
            yield b"x" * 100

    headers = {"Content-Type": "application/json"}
    async with running_server(lambda _: say("x"), limits=Limits(max_body_bytes=500)) as server:
        announced = await server.http.post(COMPLETIONS, json={"prompt": "a" * 600})
        streamed = await server.http.post(COMPLETIONS, content=parts(), headers=headers)
        fitting = await server.http.post(COMPLETIONS, json={"prompt": "a" * 400})
    assert (announced.status_code, streamed.status_code, fitting.status_code) == (413, 413, 200)
    assert "500 bytes" in announced.json()["error"]["message"]


async def test_unknown_model_or_path_is_a_404() -> None:
    async with running_server(lambda _: say("x")) as server:
        for body in ({"prompt": "a", "model": "gpt"}, {"prompt": "a", "model": ""}):
            answer = await server.http.post(COMPLETIONS, json=body)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"


async def test_full_queue_is_a_429_with_retry_after() -> None:
    settings = Settings(max_running=1, max_waiting=1)
    async with running_server(lambda _: say("abc", hold_after=0), settings) as server:
        held = [asyncio.ensure_future(post(server, COMPLETIONS, prompt="a")) for _ in range(2)]
        while server.client.active < 2:
            await asyncio.sleep(0.002)
        for stream in (False, True):
            answer = await server.http.post(COMPLETIONS, json={"prompt": "a", "stream": stream})
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
        server.engine.released.set()
        assert [(await one)["choices"][0]["text"] for one in held] == ["abc", "abc"]


async def test_auth_is_needed_except_for_health() -> None:
    async with running_server(lambda _: say("x"), Settings(api_key="sesame")) as server:
        for given in (None, "Bearer wrong", "Basic sesame", "Bearer", "sesame", "Bearer sésame"):
            headers = {} if given is None else {"Authorization": given.encode()}
            for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
                answer = await server.http.get(path, headers=headers)  # type: ignore[arg-type]
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert (await server.http.get("/health")).status_code == 200
        opened = await server.http.get("/v1/models", headers={"Authorization": "Bearer sesame"})
        assert opened.status_code == 200


class BrokenTokenizer(ByteTokenizer):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise ZeroDivisionError

    def stream(self, context: Sequence[int] = (), skip_special_tokens: bool = True) -> ByteDetokenizer:
        stream = ByteDetokenizer(skip_special_tokens)

        def push(token: int) -> str:
            if token == ord("c"):
                raise ZeroDivisionError
            return chr(token)

        stream.push = push  # type: ignore[method-assign]
        return stream


async def test_unhandled_error_is_a_500_in_openai_format() -> None:
    async with running_server(lambda _: say("abcd", group=1), tokenizer=BrokenTokenizer()) as server:
        before = await server.http.post(COMPLETIONS, json={"prompt": "a"})
        whole = await server.http.post(COMPLETIONS, json={"prompt": [97]})
        stream = await server.http.post(COMPLETIONS, json={"prompt": [97], "stream": True})
        server.engine.wait_for(lambda: server.engine.running == 0)
    assert (before.status_code, whole.status_code, stream.status_code) == (500, 500, 200)
    assert before.json()["error"]["code"] == "internal_error"
    assert '"code":"internal_error"' in stream.text
    assert "ZeroDivision" not in before.text + whole.text + stream.text
    assert before.headers["x-request-id"]


async def test_wrong_path_or_method_names_alternatives() -> None:
    async with running_server(lambda _: say("x")) as server:
        path = await server.http.post("/v1/others", json={})
        method = await server.http.get(COMPLETIONS)
    assert (path.status_code, method.status_code) == (404, 405)
    assert "/v1/others; GET /openapi.json lists" in path.json()["error"]["message"]
    assert method.headers["allow"] == "POST"
    assert method.json()["error"]["message"] == f"{COMPLETIONS} takes POST, not GET"


class SpacesTokenizer(ByteTokenizer):
    longest = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.longest = max(self.longest, len(text))
        return [32] * (len(text) // 16)


async def test_long_prompt_is_tokenized_only_to_the_context() -> None:
    tokenizer = SpacesTokenizer()
    async with running_server(lambda _: say("abcd"), tokenizer=tokenizer) as server:
        answer = await server.http.post(COMPLETIONS, json={"prompt": " " * 2_000_000})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert tokenizer.longest <= CONTEXT * 32


async def test_long_names_are_cut_in_errors() -> None:
    async with running_server(lambda _: say("x")) as server:
        wrong = {"x" * 100_000: "1"}
        for body in ({"prompt": "a", "metadata": wrong}, {"prompt": "a", "model": "x" * 100_000}):
            answer = await server.http.post(COMPLETIONS, json=body)
            assert answer.status_code in (400, 404)
            assert len(answer.content) < 2_000


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/embeddings", "/v1/audio/speech", "/v1/images/generations"]
)
async def test_paths_of_other_apis_are_not_built(path: str) -> None:
    async with running_server(lambda _: say("x")) as server:
        answer = await server.http.post(path, json={"input": "x"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "not_built")
    assert error["message"].startswith(f"{path}: not built; this server ")
