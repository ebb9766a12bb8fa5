"""Tests of isolation between requests: prefix cache salts, cached-token counts, chunk lengths."""

import json
from pathlib import Path

import pytest

from ssd_serve.base.messages import RequestOptions, SamplingParameters, Submit
from ssd_serve.base.settings import Settings
from ssd_serve.server.access.tenants import Tenants
from tests.server.crashing_engine import CrashingEngine
from tests.server.fakes import FIGURES, FakeEngine, say, submit
from tests.server.running_server import RunningServer, events, post, running_server
from tests.server.test_auth import OPERATOR_KEY, bearer
from tests.server.test_keys import ANNA, BEN, write

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def salts(engine: FakeEngine) -> list[bytes]:
    return [submit.options.salt for submit in engine.submits()]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    write(path, f"anna {ANNA}\nben {BEN}\n")
    return path


async def test_cache_salt_separates_prefix_cache() -> None:
    async with running_server(lambda _: say("x")) as server:
        for salt in (None, None, "mine", "mine", "yours"):
            await post(server, COMPLETIONS, prompt="a", cache_salt=salt)
        await post(server, CHAT, messages=[{"role": "user", "content": "Hi"}], cache_salt="mine", n=2)
    first, second, mine, again, yours, *chat = salts(server.engine)
    assert first == second == b""
    assert mine == again != yours
    assert chat == [mine, mine]
    assert b"mine" not in mine


async def test_api_keys_have_separate_prefix_caches(keys: Path) -> None:
    settings = Settings(api_keys_file=keys, api_key=OPERATOR_KEY)
    async with running_server(lambda _: say("x"), settings) as server:
        for key, salt in (
            *((ANNA, None), (ANNA, None), (ANNA, "s"), (BEN, None), (BEN, "s")),
            *((OPERATOR_KEY, None), (OPERATOR_KEY, "s"), (OPERATOR_KEY, "anna\0")),
        ):
            body = {"prompt": "a", "cache_salt": salt}
            answer = await server.http.post(COMPLETIONS, json=body, headers=bearer(key))
            assert answer.status_code == 200
    anna, same, *others = salts(server.engine)
    assert anna == same
    assert len({anna, *others}) == 7
    assert others[3] == b""  # the operator's request without a cache_salt


async def test_salt_by_key_setting_can_be_off(keys: Path) -> None:
    settings = Settings(api_keys_file=keys, salt_by_key=False)
    async with running_server(lambda _: say("x"), settings) as server:
        for key in (ANNA, BEN):
            await server.http.post(COMPLETIONS, json={"prompt": "a"}, headers=bearer(key))
    assert salts(server.engine) == [b"", b""]


async def test_salts_differ_between_processes(keys: Path) -> None:
    first, second = Tenants(Settings(api_keys_file=keys)), Tenants(Settings(api_keys_file=keys))
    anna, other = first.find(ANNA.encode()), second.find(ANNA.encode())
    assert anna is not None
    assert other is not None
    assert first.salt(anna, None) == first.salt(anna, None) != second.salt(other, None)


async def cached(server: RunningServer, path: str, body: dict[str, object], key: str = "") -> list[object]:
    headers = bearer(key) if key else {}
    wanted = {"include_usage": True, "continuous_usage_stats": True}
    whole = await server.http.post(path, json=body, headers=headers)
    stream = await server.http.post(
        path, json={**body, "stream": True, "stream_options": wanted}, headers=headers
    )
    chunks = [json.loads(line[6:]) for line in stream.text.split("\n\n") if line.startswith("data: {")]
    details = [each["usage"]["prompt_tokens_details"] for each in (whole.json(), *chunks)]
    return [each and each["cached_tokens"] for each in details]


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, {"prompt": "abc"}), (CHAT, {"messages": [{"role": "user", "content": "Hi"}]})],
)
async def test_cached_tokens_are_reported_only_for_own_prompts(
    path: str, body: dict[str, object], keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FIGURES, "cached_prompt_tokens", 3)
    async with running_server(lambda _: say("xyz")) as server:
        assert set(await cached(server, path, body)) == {None}
        own = await cached(server, path, {**body, "cache_salt": "mine"})
        assert own[0] == own[-1] == 3
        assert None not in own
    async with running_server(lambda _: say("xyz"), Settings(tell_cached_tokens=True)) as server:
        assert (await cached(server, path, body))[0] == 3
    settings = Settings(api_keys_file=keys, api_key=OPERATOR_KEY)
    async with running_server(lambda _: say("xyz"), settings) as server:
        assert (await cached(server, path, body, ANNA))[0] == 3
        assert set(await cached(server, path, body, OPERATOR_KEY)) == {None}
    async with running_server(
        lambda _: say("xyz"), Settings(api_keys_file=keys, salt_by_key=False)
    ) as server:
        assert set(await cached(server, path, body, ANNA)) == {None}


async def test_prefix_cache_hit_changes_nothing_else_in_response(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, object]] = []
    async with running_server(lambda _: say("xyz")) as server:
        for tokens in (0, 3):
            monkeypatch.setattr(FIGURES, "cached_prompt_tokens", tokens)
            monkeypatch.setattr(FIGURES, "prompt_s", tokens / 1e3)
            answer = await post(server, COMPLETIONS, prompt="abc", seed=1)
            assert {answer["timings"][name] for name in ("queue_ms", "prompt_ms", "prompt_per_second")} == {
                None
            }
            unsteady = ("id", "created", "timings")
            found.append({name: answer[name] for name in answer if name not in unsteady})
    assert found[0] == found[1]


@pytest.mark.parametrize("salt", ["", "s" * 257, 5, ["s"]])
async def test_invalid_cache_salt_returns_400(salt: object) -> None:
    async with running_server(lambda _: say("x")) as server:
        answer = await server.http.post(COMPLETIONS, json={"prompt": "a", "cache_salt": salt})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_salt"


async def test_cache_salt_with_unusual_characters() -> None:
    async with running_server(lambda _: say("x")) as server:
        for written in (rb"\ud800", rb"\u0000", "ü🙂".encode(), b"\xff"):
            answer = await server.http.post(
                COMPLETIONS,
                content=b'{"prompt": "a", "cache_salt": "' + written + b'"}',
                headers={"Content-Type": "application/json"},
            )
            assert answer.status_code in (200, 400)


async def test_resumed_request_keeps_cache_salt(crashing: CrashingEngine) -> None:
    def submitted() -> list[Submit]:
        crashing.engine.take()
        return [submit for submit, *_ in crashing.engine.requests.values()]

    await crashing.until(lambda: crashing.client.ready is not None)
    submit(
        crashing.client,
        (7,),
        SamplingParameters(max_tokens=4),
        1,
        lambda _: None,
        options=RequestOptions(salt=b"mine"),
    )
    for _ in range(2):
        await crashing.until(lambda: bool(submitted()))
        assert [submit.options.salt for submit in submitted()] == [b"mine"]
        crashing.die()
        crashing.live()


PIECES = ["a", "ab" * 20, "long" * 30, "ü" * 40]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_obfuscated_chunks_have_equal_length(path: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "abc"}
    sizes: set[int] = set()
    padding: set[str] = set()
    for text in PIECES:
        async with running_server(lambda _, text=text: say(text, group=len(text.encode()))) as server:  # type: ignore[misc]
            answer = await server.http.post(
                path,
                json={**body, "stream": True, "seed": 1, "stream_options": {"include_obfuscation": True}},
            )
        chunks = [f"{line}\n\n" for line in answer.text.split("\n\n") if line.startswith("data: {")]
        told = [json.loads(chunk[6:]) for chunk in chunks]
        said = [chunk for chunk, one in zip(chunks, told, strict=True) if "metrics" not in one]
        sizes |= {len(chunk.encode()) for chunk in said}
        padding |= {one["obfuscation"] for one in told}
    assert sizes == {512}
    assert len(padding) > len(PIECES)


async def test_long_obfuscated_chunks_are_padded_to_power_of_two() -> None:
    async with running_server(lambda _: say("abcdef" * 60, group=360)) as server:
        options = {"include_obfuscation": True, "include_usage": True}
        answer = await server.http.post(
            COMPLETIONS, json={"prompt": "abc", "stream": True, "max_tokens": 400, "stream_options": options}
        )
    sizes = {len(f"{line}\n\n".encode()) for line in answer.text.split("\n\n") if line.startswith("data: {")}
    assert sizes <= {512, 1024, 2048}
    assert 1024 in sizes


async def test_obfuscation_is_off_by_default() -> None:
    async with running_server(lambda _: say("abc")) as server:
        for options in (None, {"include_obfuscation": False}, {"include_obfuscation": None}):
            found = await events(server, COMPLETIONS, prompt="a", stream_options=options)
            assert not any("obfuscation" in chunk for chunk in found)
        refused = await server.http.post(
            COMPLETIONS, json={"prompt": "a", "stream_options": {"include_obfuscation": True}}
        )
    assert refused.status_code == 400


async def test_progress_of_prompts_is_reported_where_cached_tokens_may_be() -> None:
    body = {"prompt": "a long prompt", "n": 2, "return_progress": True}
    expected = {"processed": 5, "total": 14, "cache": 2, "time_ms": 500}
    async with running_server(lambda _: say("x")) as server:
        for more, progress in (({"cache_salt": "mine"}, [expected]), ({}, [])):
            chunks = await events(server, COMPLETIONS, **body, **more)
            assert [each["prompt_progress"] for each in chunks if "prompt_progress" in each] == progress
        assert await post(server, COMPLETIONS, **body, cache_salt="mine")
        wanted = [each.options.return_progress for each in server.engine.submits()]
        assert wanted == [True, *[False] * 5]
