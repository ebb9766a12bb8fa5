"""Tests of speculation options of requests, and of timings and round traces in responses."""

from typing import Any

import pytest

from ssd_serve.base.messages import FixedShape
from tests.server.fakes import FIGURES, say
from tests.server.running_server import events, post, running_server

pytestmark = pytest.mark.anyio
ASK = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": ASK},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("wish", "most"), [({"mode": "off"}, 0), ({"max_nodes": 3}, 3), ({"mode": "auto"}, None), (None, None)]
)
async def test_speculation_options_limit_draft_tokens(path: str, wish: object, most: int | None) -> None:
    async with running_server(lambda _: say("xy")) as server:
        await post(server, path, **BODIES[path], n=2, speculation=wish)
        assert [submit.options.max_nodes for submit in server.engine.submits()] == [most, most]


@pytest.mark.parametrize(
    ("wish", "shape"),
    [
        ({"num_speculative_tokens": 4}, FixedShape(4)),
        ({"num_speculative_tokens": 9, "shape": "tree"}, FixedShape(9, chain=False)),
        ({"max_nodes": 3}, None),
    ],
)
async def test_fixed_shape_reaches_the_engine(wish: object, shape: FixedShape | None) -> None:
    async with running_server(lambda _: say("xy")) as server:
        await post(server, "/v1/completions", prompt="a", speculation=wish)
        assert [submit.options.shape for submit in server.engine.submits()] == [shape]


@pytest.mark.parametrize(
    "wish",
    [
        {"mode": "ssd"},
        {"max_nodes": -1},
        {"max_node": 3},
        {"trace": 1},
        {"num_speculative_tokens": 0},
        {"shape": "tree"},
        5,
    ],
)
async def test_invalid_speculation_options_return_400(wish: object) -> None:
    async with running_server(lambda _: say("xy")) as server:
        answer = await server.http.post("/v1/completions", json={"prompt": "a", "speculation": wish})
    assert answer.status_code == 400
    assert "speculation" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_speculation_trace_reports_tokens_of_each_round(path: str) -> None:
    asked = {**BODIES[path], "speculation": {"trace": True}, "stop": ["ghi"]}
    async with running_server(lambda _: say("abcdefghkl", group=3)) as server:
        whole = await post(server, path, **asked)
        told = [
            choice["rounds"]
            for chunk in await events(server, path, **asked)
            for choice in chunk["choices"]
            if "rounds" in choice
        ]
        untold = await post(server, path, **BODIES[path])
    assert whole["choices"][0]["rounds"] == [3, 3, 3, 1]
    assert [size for rounds in told for size in rounds] == [3, 3, 3, 1]
    assert "rounds" not in untold["choices"][0]


@pytest.mark.parametrize("path", BODIES)
async def test_trace_of_the_first_choice_comes_with_its_tokens(path: str) -> None:
    asked = {**BODIES[path], "n": 2, "speculation": {"trace": True}, "return_token_ids": True}
    async with running_server(lambda _: say("abcdefg", group=3)) as server:
        whole = await post(server, path, **asked)
        chunks = [each for chunk in await events(server, path, **asked) for each in chunk["choices"]]
        traced = [submit.options.trace for submit in server.engine.submits()]
        untraced = await post(server, path, **BODIES[path])
    assert traced == [True, False, True, False]
    first, second = whole["choices"]
    assert "trace" not in second
    assert "trace" not in untraced["choices"][0]
    assert [len(each["nodes"]) for each in first["trace"]] == [3, 3, 1]
    assert [each for chunk in chunks for each in chunk.get("trace", ())] == first["trace"]
    for entry in [first, *(chunk for chunk in chunks if chunk.get("trace"))]:
        told = [
            token
            for each in entry["trace"]
            for token in (*(each["nodes"][at]["token"] for at in each["accepted"]), each["bonus"]["token"])
        ]
        assert told == entry["token_ids"]
    node = first["trace"][0]["nodes"][1]
    assert (node["text"], node["parent"], node["depth"], node["sources"]) == ("b", 0, 2, ["tiny"])


@pytest.mark.parametrize(("salt", "text"), [({}, None), ({"cache_salt": "mine"}, "#")])
async def test_trace_reveals_other_texts_and_cached_prompts_with_a_salt_only(
    salt: dict[str, str], text: str | None
) -> None:
    async with running_server(lambda _: say("abc")) as server:
        answer = await post(server, "/v1/completions", prompt="a", speculation={"trace": True}, **salt)
    first = answer["choices"][0]["trace"][0]
    assert (first["nodes"][-1]["text"], first["nodes"][-1]["sources"]) == (text, ["suffix"])
    assert (first["forward_ms"] < first["end_ms"]) == bool(salt), (
        "the time of the prompt tells if it was cached"
    )


async def test_timings_of_response_and_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FIGURES, "prompt_s", 0.001)
    async with running_server(lambda _: say("abcdef")) as server:
        answer = await post(server, "/v1/completions", prompt="ab", cache_salt="mine")
        chunks = await events(server, "/v1/completions", prompt="ab", cache_salt="mine")
    for timings in (answer["timings"], chunks[-1]["timings"]):
        assert (timings["prompt_n"], timings["predicted_n"], timings["prompt_ms"]) == (3, 6, 1.0)
        assert timings["queue_ms"] == pytest.approx(max(0, timings["first_token_ms"] - 1.0), abs=0.01)
        assert timings["prompt_per_second"] == 3000
        assert timings["draft_n_accepted"] == FIGURES.accepted
    assert sum("timings" in chunk for chunk in chunks) == 1


async def test_include_speculation_false_drops_figures_from_stream() -> None:
    options = {"include_usage": True, "include_speculation": False}
    async with running_server(lambda _: say("abcdef")) as server:
        chunks = await events(server, "/v1/completions", prompt="ab", stream_options=options)
    assert not any("metrics" in chunk or "timings" in chunk for chunk in chunks)
    assert chunks[-1]["usage"]["completion_tokens"] == 6
