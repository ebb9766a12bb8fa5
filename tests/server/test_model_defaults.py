"""Tests of sampling defaults from the model's `generation_config.json`."""

from typing import Any

import msgspec
import pytest

from ssd_serve.base.messages import SamplingParameters
from tests.server.fakes import CONTEXT, READY, say
from tests.server.running_server import post, running_server

pytestmark = pytest.mark.anyio
MODEL = msgspec.structs.replace(READY, sampling={"temperature": 0.6, "top_p": 0.95, "max_tokens": 40})
WAYS = [
    pytest.param("/v1/completions", {"prompt": "Hi"}, id="completions"),
    pytest.param("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, id="chat"),
]


async def asked(path: str, fields: dict[str, object]) -> SamplingParameters:
    async with running_server(lambda _: say("x"), model=MODEL) as server:
        await post(server, path, **fields)
        return server.engine.submits()[0].parameters


@pytest.mark.parametrize(("path", "fields"), WAYS)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"temperature": None, "top_p": None, "max_tokens": None}, {}),
        (
            {"temperature": 1, "max_tokens": 50, "min_p": 0.1},
            {"temperature": 1.0, "max_tokens": 50, "min_p": 0.1},
        ),
    ],
)
async def test_model_defaults_fill_missing_sampling_parameters(
    path: str, fields: dict[str, object], given: dict[str, object], expected: dict[str, Any]
) -> None:
    defaults: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 40}
    assert await asked(path, fields | given) == SamplingParameters(**{**defaults, **expected})


async def test_model_default_max_tokens_shrinks_to_context() -> None:
    found = await asked("/v1/completions", {"prompt": "a" * (CONTEXT - 10)})
    assert found.max_tokens < 40


async def test_model_card_has_sampling_defaults() -> None:
    async with running_server(lambda _: say("x"), model=MODEL) as server:
        card = (await server.http.get("/v1/models")).json()["data"][0]
    async with running_server(lambda _: say("x"), ready=False) as server:
        early = (await server.http.get("/v1/models")).json()["data"][0]
    assert card["default_sampling_params"] == {"temperature": 0.6, "top_p": 0.95, "max_tokens": 40}
    assert early["default_sampling_params"] is None


async def test_model_defaults_change_system_fingerprint() -> None:
    async def fingerprint(sampling: dict[str, int | float]) -> object:
        model = msgspec.structs.replace(READY, sampling=sampling)
        async with running_server(lambda _: say("x"), model=model) as server:
            return (await post(server, "/v1/completions", prompt="Hi"))["system_fingerprint"]

    assert await fingerprint({"top_p": 0.9}) != await fingerprint({"top_p": 0.8})
