"""API keys, rate limits, and access to the metrics."""

import asyncio
import logging
from pathlib import Path

import pytest

from ssd_serve.base.settings import Settings
from ssd_serve.server.access.auth import exposure_warnings
from ssd_serve.server.access.tenants import Tenants
from tests.server.fakes import STATUS, say
from tests.server.running_server import RunningServer, running_server
from tests.server.test_keys import ANNA, BEN, write
from tests.server.test_rates import Clock

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"
OPERATOR_KEY = "o" * 32


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    write(path, f"anna {ANNA}\nben {BEN}\n")
    return path


async def status(server: RunningServer, key: str, path: str = "/v1/models") -> int:
    return (await server.http.get(path, headers=bearer(key))).status_code


async def test_auth_accepts_keys_of_the_file_and_of_the_operator(keys: Path) -> None:
    settings = Settings(api_keys_file=keys, api_key=OPERATOR_KEY + "\n")
    async with running_server(lambda _: say("x"), settings) as server:
        found = [await status(server, key) for key in (ANNA, BEN, OPERATOR_KEY, ANNA[:-1], ANNA + BEN, "")]
    assert found == [200, 200, 200, 401, 401, 401]


async def test_auth_keys_reload_during_a_stream(keys: Path) -> None:
    async with running_server(lambda _: say("abcdef", hold_after=1), Settings(api_keys_file=keys)) as server:
        body = {"prompt": "a", "stream": True}
        stream = asyncio.ensure_future(server.http.post(COMPLETIONS, json=body, headers=bearer(ANNA)))
        while server.client.active < 1:
            await asyncio.sleep(0.002)
        write(keys, f"anna {'c' * 32}\nben {BEN}")
        await asyncio.sleep(1.1)
        assert [await status(server, key) for key in (ANNA, "c" * 32, BEN)] == [401, 200, 200]
        server.engine.released.set()
        assert "[DONE]" in (await stream).text


async def test_rate_limit_of_requests_answers_429_before_the_body_is_read(keys: Path) -> None:
    write(keys, f"anna {ANNA} requests_per_minute=2\nben {BEN}")
    async with running_server(lambda _: say("x"), Settings(api_keys_file=keys)) as server:
        answers = [
            await server.http.post(COMPLETIONS, content=b"{", headers=bearer(ANNA)),  # counts, wrong as it is
            await server.http.post(COMPLETIONS, json={"prompt": "a"}, headers=bearer(ANNA)),
            await server.http.post(COMPLETIONS, content=b"{", headers=bearer(ANNA)),
        ]
        others = await server.http.post(COMPLETIONS, json={"prompt": "a"}, headers=bearer(BEN))
        looked = await server.http.get("/v1/models", headers=bearer(ANNA))
    assert [answer.status_code for answer in answers] == [415, 200, 429]
    assert (others.status_code, looked.status_code) == (200, 200)
    told = answers[1].headers
    assert told["x-ratelimit-limit-requests"] == "2"
    assert told["x-ratelimit-remaining-requests"] == "0"
    assert 30 <= float(told["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
    assert "x-ratelimit-limit-tokens" not in told
    refused = answers[2]
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert "'anna' has a limit of 2 requests a minute" in refused.json()["error"]["message"]
    assert not [name for name in others.headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize("stream", [False, True])
async def test_rate_limit_of_tokens_is_charged_during_generation(stream: bool) -> None:
    """Four prompt tokens (three bytes and the begin token) and six of output."""
    settings = Settings(key_tokens_per_minute=6)
    async with running_server(lambda _: say("abcdef"), settings) as server:
        body = {"prompt": "abc", "stream": stream}
        first = await server.http.post(COMPLETIONS, json=body)
        second = await server.http.post(COMPLETIONS, json=body)
    assert first.status_code == 200
    assert "def" in first.text
    assert second.status_code == 429
    assert second.headers["x-ratelimit-remaining-tokens"] == "0"
    # One token above what is overdrawn.
    assert 20 <= int(second.headers["retry-after"]) <= 50
    assert "this server has a limit of 6 tokens a minute" in second.json()["error"]["message"]


async def test_rate_limit_of_tokens_for_concurrent_requests() -> None:
    settings = Settings(key_tokens_per_minute=6)
    async with running_server(lambda _: say("x", hold_after=0), settings) as server:
        asked = [server.http.post(COMPLETIONS, json={"prompt": "abcdefgh"}) for _ in range(4)]
        answering = [asyncio.ensure_future(each) for each in asked]
        await asyncio.sleep(0.2)
        server.engine.released.set()
        found = sorted([(await each).status_code for each in answering])
    assert found == [200, 429, 429, 429]


async def test_rate_limit_survives_a_replaced_key(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    write(path, f"anna {ANNA} requests_per_minute=1")
    tenants = Tenants(Settings(api_keys_file=path), clock)
    anna = tenants.find(ANNA.encode())
    assert anna is not None
    anna.begin_request()
    write(path, f"anna {BEN} requests_per_minute=1")
    clock.now += 2
    assert tenants.find(ANNA.encode()) is None
    assert tenants.find(BEN.encode()) is anna
    assert anna.headers()["x-ratelimit-remaining-requests"] == "0"


async def test_metrics_by_key_have_names_of_current_holders_only(keys: Path) -> None:
    settings = Settings(api_keys_file=keys, metrics_key="m" * 32)
    async with running_server(lambda _: say("abcdef"), settings) as server:
        await server.http.post(COMPLETIONS, json={"prompt": "abc"}, headers=bearer(ANNA))
        await status(server, "wrong")
        page = (await server.http.get("/metrics", headers=bearer("m" * 32))).text
        write(keys, f"ben {BEN}")
        await asyncio.sleep(1.1)
        later = (await server.http.get("/metrics", headers=bearer("m" * 32))).text
    assert 'ssd_key_requests_total{key="anna",model_name="ssd-embedded"} 1.0' in page
    assert 'ssd_key_prompt_tokens_total{key="anna",model_name="ssd-embedded"} 4.0' in page
    assert 'ssd_key_generation_tokens_total{key="anna",model_name="ssd-embedded"} 6.0' in page
    assert 'ssd_key_over_limit_total{key="ben",limit="tokens",model_name="ssd-embedded"} 0.0' in page
    assert 'ssd_unknown_keys_total{model_name="ssd-embedded"} 1.0' in page
    assert ANNA not in page
    assert "anna" not in later


@pytest.mark.parametrize(
    ("settings", "opening"),
    [
        ({}, {"", ANNA, "m" * 32}),
        ({"api_key": OPERATOR_KEY}, {OPERATOR_KEY}),
        ({"api_key": OPERATOR_KEY, "metrics_key": "m" * 32}, {"m" * 32}),
        ({"metrics_key": "m" * 32}, {"m" * 32}),
    ],
)
async def test_metrics_access_by_settings(settings: dict[str, str], opening: set[str]) -> None:
    async with running_server(lambda _: say("x"), Settings.model_validate(settings)) as server:
        for key in ("", ANNA, OPERATOR_KEY, "m" * 32):
            expected = key in opening or not settings
            assert (await status(server, key, "/metrics") == 200) is expected, key


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, True),
        ({"api_key": OPERATOR_KEY}, False),
        ({"api_key": OPERATOR_KEY, "tell_cached_tokens": True}, True),
        ({"api_key": OPERATOR_KEY, "metrics_key": OPERATOR_KEY}, True),
        ({"api_key": OPERATOR_KEY, "metrics_port": 9100}, True),
    ],
)
async def test_metrics_hide_cached_tokens_from_shared_keys(settings: dict[str, object], told: bool) -> None:
    async with running_server(lambda _: say("x"), Settings.model_validate(settings)) as server:
        server.engine.tell(STATUS)
        while server.client.status is None:
            await asyncio.sleep(0.002)
        page = (await server.http.get("http://server:9100/metrics", headers=bearer(OPERATOR_KEY))).text
    assert "ssd_prefix_cache_queries_total" in page
    assert ("ssd_prefix_cache_hits_total" in page) is told


async def test_metrics_need_more_than_a_key_of_the_file(keys: Path) -> None:
    settings = Settings(api_keys_file=keys, api_key=OPERATOR_KEY)
    async with running_server(lambda _: say("x"), settings) as server:
        assert [await status(server, key, "/metrics") for key in (ANNA, OPERATOR_KEY, "")] == [403, 200, 401]


async def test_metrics_key_gives_no_access_to_the_api(keys: Path) -> None:
    settings = Settings(api_keys_file=keys, metrics_key="m" * 32)
    async with running_server(lambda _: say("x"), settings) as server:
        assert await status(server, "m" * 32) == 401


async def test_metrics_port_has_metrics_and_health_only() -> None:
    settings = Settings(api_key=OPERATOR_KEY, metrics_port=9100)
    async with running_server(lambda _: say("x"), settings) as server:
        there, here = "http://server:9100", "http://server:8000"
        paths = ("/metrics", "/health", "/v1/models")
        found = [[(await server.http.get(at + path)).status_code for path in paths] for at in (there, here)]
        keyed = (await server.http.get(f"{here}/metrics", headers=bearer(OPERATOR_KEY))).status_code
    assert found == [[200, 200, 404], [404, 200, 401]]
    assert keyed == 404


async def test_failed_request_log_has_the_key_name(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_server(lambda _: say("x"), Settings(api_keys_file=keys)) as server:
        with caplog.at_level(logging.DEBUG, "ssd_serve.server.http.middleware"):
            named = {**bearer(ANNA), "X-Request-Id": "r1"}
            await server.http.post(COMPLETIONS, json={"prompt": 5}, headers=named)
    (line,) = [record for record in caplog.records if record.name.endswith("middleware")]
    told = {"method": "POST", "path": COMPLETIONS, "status": 400, "key": "anna"}
    assert (line.getMessage(), vars(line)["fields"]) == ("answered", told)
    assert ANNA not in caplog.text


def test_exposure_warnings(keys: Path) -> None:
    for settings, words in (
        (Settings(), ["anyone who reaches this address"]),
        (Settings(api_keys_file=keys), []),
        (Settings(api_key=ANNA, metrics_port=9100), ["anyone who reaches SSD_METRICS_PORT"]),
        (Settings(api_key=ANNA, metrics_port=9100, metrics_key=BEN), []),
    ):
        found = exposure_warnings(settings, loopback=False)
        assert len(found) == len(words)
        assert all(each.startswith(word) for each, word in zip(found, words, strict=True))
        assert exposure_warnings(settings, loopback=True) == []
