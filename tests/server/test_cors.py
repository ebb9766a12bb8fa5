"""CORS, and the root path of a proxy."""

from collections.abc import Sequence

import httpx
import pytest

from ssd_serve.base.errors import SettingsError
from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import resolve
from tests.server.fakes import ByteTokenizer, say
from tests.server.running_server import RunningServer, running_server

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"
PAGE = "https://app.example.org"
ASKING = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


async def preflight(server: RunningServer, origin: str) -> httpx.Response:
    return await server.http.options(COMPLETIONS, headers={"Origin": origin, **ASKING})


async def test_cors_is_off_by_default() -> None:
    async with running_server(lambda _: say("x")) as server:
        asked = await preflight(server, PAGE)
        answer = await server.http.get("/v1/models", headers={"Origin": PAGE})
    assert asked.status_code == 405
    assert not [name for name in [*asked.headers, *answer.headers] if name.startswith("access-control")]


@pytest.mark.parametrize("origins", [PAGE, f"http://localhost:3000, {PAGE.upper()}", "*"])
async def test_cors_allows_named_origins(origins: str) -> None:
    """Preflight requests need no key; requests do."""
    settings = resolve({"cors_origins": origins, "api_key": "sesame"})
    async with running_server(lambda _: say("x"), settings) as server:
        asked = await preflight(server, PAGE)
        key = {"Origin": PAGE, "Authorization": "Bearer sesame"}
        answer = await server.http.post(COMPLETIONS, json={"prompt": "a"}, headers=key)
        stream = await server.http.post(COMPLETIONS, json={"prompt": "a", "stream": True}, headers=key)
        wrong = await server.http.post(COMPLETIONS, json={"prompt": 5}, headers=key)
        refused = await server.http.post(COMPLETIONS, json={"prompt": "a"}, headers={"Origin": PAGE})
    assert asked.status_code == 200
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "x-stainless-lang" in asked.headers["access-control-allow-headers"]
    assert [each.status_code for each in (answer, stream, wrong, refused)] == [200, 200, 400, 401]
    for each in (asked, answer, stream, wrong, refused):
        assert each.headers["access-control-allow-origin"] in (PAGE, "*")
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]


async def test_cors_headers_on_a_500() -> None:
    def fail(_: Sequence[int]) -> str:
        raise ZeroDivisionError

    tokenizer = ByteTokenizer()
    tokenizer.decode = fail  # type: ignore[method-assign, assignment]
    async with running_server(lambda _: say("x"), Settings(cors_origins="*"), tokenizer=tokenizer) as server:
        answer = await server.http.post("/detokenize", json={"tokens": [97]}, headers={"Origin": PAGE})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["access-control-allow-origin"] == "*"


async def test_cors_refuses_other_origins() -> None:
    async with running_server(lambda _: say("x"), resolve({"cors_origins": PAGE})) as server:
        asked = await preflight(server, "https://evil.example.org")
    assert asked.status_code == 400
    assert "access-control-allow-origin" not in asked.headers


@pytest.mark.parametrize("origins", ["app.example.org", f"{PAGE}/", f"{PAGE}/page", f"{PAGE},", "https://"])
async def test_cors_rejects_invalid_origins(origins: str) -> None:
    with pytest.raises(SettingsError, match=r"--cors-origins: .* is no origin; write"):
        resolve({"cors_origins": origins})


async def test_root_path_stripped_by_the_proxy_or_not() -> None:
    settings = resolve({"root_path": "/models/llm", "api_key": "sesame"})
    key = {"Authorization": "Bearer sesame"}
    async with running_server(lambda _: say("x"), settings) as server:
        for start in ("", "/models/llm"):
            assert (await server.http.get(f"{start}/health")).status_code == 200
            assert (await server.http.get(f"{start}/v1/models")).status_code == 401
            assert (await server.http.get(f"{start}/v1/models/ssd-embedded", headers=key)).status_code == 200
            answer = await server.http.post(f"{start}{COMPLETIONS}", json={"prompt": "a"}, headers=key)
            assert answer.json()["choices"][0]["text"] == "x"
        document = (await server.http.get("/openapi.json", headers=key)).json()
    assert document["servers"] == [{"url": "/models/llm"}]


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "/a//b", "https://x.org/llm", "/a?b"])
async def test_invalid_root_path_is_a_settings_error(path: str) -> None:
    with pytest.raises(SettingsError, match="--root-path: must begin with /"):
        resolve({"root_path": path})
