"""Tests of request ids: taken from the client or generated, and returned with every response."""

import pytest

from ssd_serve.base.settings import Settings
from tests.server.fakes import say
from tests.server.running_server import running_server

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "Hi"}]
HEADER = "X-Request-Id"


@pytest.mark.parametrize(
    ("path", "body", "begin", "stream"),
    [(COMPLETIONS, {"prompt": "a"}, "cmpl-", False), (CHAT, {"messages": ASK}, "chatcmpl-", True)],
)
async def test_request_id_of_the_client_is_returned(
    path: str, body: dict[str, object], begin: str, stream: bool
) -> None:
    async with running_server(lambda _: say("x")) as server:
        for headers, asked, name in (
            ({HEADER: "trace-7/a"}, None, "trace-7/a"),
            ({HEADER: "trace-7/a"}, "other", "trace-7/a"),
            ({}, "job:9", "job:9"),
        ):
            sent = {**body, "stream": stream, "request_id": asked}
            answer = await server.http.post(path, json=sent, headers=headers)
            assert answer.headers.get_list(HEADER) == [name]
            assert f'"id":"{begin}{name}"' in answer.text


async def test_request_id_is_generated_without_a_valid_one() -> None:
    async with running_server(lambda _: say("x")) as server:
        names = [
            (await server.http.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)).headers[HEADER]
            for headers in ({}, {}, {HEADER: "two words"}, {HEADER: "a" * 129}, {HEADER: ""})
        ]
    assert len(set(names)) == 5
    assert all(len(name) == 32 and name.isalnum() for name in names)


async def test_request_id_of_refused_requests() -> None:
    async with running_server(lambda _: say("x"), Settings(api_key="sesame")) as server:
        named, key = {HEADER: "mine"}, {HEADER: "mine", "Authorization": "Bearer sesame"}
        answers = [
            await server.http.post(COMPLETIONS, json={"prompt": "a"}, headers=named),
            await server.http.post(COMPLETIONS, json={"prompt": 5}, headers=key),
            await server.http.get("/nowhere", headers=key),
            await server.http.get("/health", headers=named),
            await server.http.get("/ping", headers=named),
        ]
    assert [answer.status_code for answer in answers] == [401, 400, 404, 200, 200]
    assert all(answer.headers[HEADER] == "mine" for answer in answers)
