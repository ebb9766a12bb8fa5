"""Random JSON for every endpoint: never a 5xx, errors in the one shape, and a server that goes on."""

import asyncio
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_serve.server.anthropic import CountRequest, MessagesRequest
from ssd_serve.server.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from ssd_serve.server.openai.responses_protocol import ResponsesRequest
from tests.examples import examples
from tests.server.fakes import say
from tests.server.running_server import running_server

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
HEADERS = {"Content-Type": "application/json"}
ASK = [{"role": "user", "content": "Hi"}]
VALID: dict[str, tuple[dict[str, Any], list[str]]] = {
    "/v1/completions": ({"prompt": "a"}, list(CompletionRequest.model_fields)),
    "/v1/chat/completions": ({"messages": ASK}, list(ChatRequest.model_fields)),
    "/v1/responses": ({"input": "Hi"}, list(ResponsesRequest.model_fields)),
    "/v1/messages": ({"messages": ASK, "max_tokens": 9}, list(MessagesRequest.model_fields)),
    "/v1/messages/count_tokens": ({"messages": ASK}, list(CountRequest.model_fields)),
    "/tokenize": ({"prompt": "a"}, list(TokenizeRequest.model_fields)),
    "/detokenize": ({"tokens": [97]}, list(DetokenizeRequest.model_fields)),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, object]:
    path = draw(st.sampled_from(sorted(VALID)))
    valid, fields = VALID[path]
    if draw(st.integers(0, 4)) == 0:
        return path, draw(JSON)
    changes = draw(st.dictionaries(st.sampled_from(fields), JSON, max_size=3))
    return path, {**valid, **changes}


@settings(max_examples=examples(15))
@given(st.lists(requests(), min_size=1, max_size=20))
def test_random_json_never_breaks_the_server(bodies: list[tuple[str, object]]) -> None:
    async def send_all() -> None:
        async with running_server(lambda _: say("x")) as server:
            for path, body in bodies:
                answer = await server.http.post(path, content=json.dumps(body), headers=HEADERS)
                assert answer.status_code in (200, 400, 404), (path, body, answer.text)
                if answer.status_code != 200:
                    assert answer.json()["error"]["message"]
            assert (await server.http.get("/health")).status_code == 200

    asyncio.run(send_all())
