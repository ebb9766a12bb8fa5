"""The check of host names against DNS rebinding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.middleware import Middleware

from ssd_serve.base.errors import SettingsError
from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import resolve
from ssd_serve.server.access.auth import AllowedHosts, allowed_hosts, host_name
from tests.server.fakes import say
from tests.server.running_server import running_server

LOOPBACK = ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:8000", "localhost."]
FOREIGN = [
    "evil.example",
    "localhost.evil.example:8000",
    "127.0.0.1.evil.example",
    "192.0.2.1",
    "[2001:db8::1]:80",
]

pytestmark = pytest.mark.anyio


async def statuses(settings: Settings, hosts: list[str], path: str = "/health") -> list[int]:
    allowed = allowed_hosts(settings, loopback=True)
    assert allowed is not None
    guards = [Middleware(AllowedHosts, allowed=allowed)]
    async with running_server(lambda _: say("x"), settings, guards=guards) as server:
        return [(await server.http.get(path, headers={"Host": host})).status_code for host in hosts]


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
async def test_host_check_without_key_on_loopback(path: str) -> None:
    assert await statuses(Settings(), LOOPBACK, path) == [200] * len(LOOPBACK)
    assert await statuses(Settings(), FOREIGN, path) == [421] * len(FOREIGN)


async def test_allowed_hosts_setting() -> None:
    settings = Settings(allowed_hosts="llm.example.org, 192.0.2.1")
    assert await statuses(settings, ["LLM.example.org:443", "192.0.2.1", *LOOPBACK]) == [200] * (
        2 + len(LOOPBACK)
    )
    assert await statuses(settings, ["evil.example"]) == [421]


async def test_host_refusal_names_the_setting() -> None:
    guards = [Middleware(AllowedHosts, allowed=frozenset[str]())]
    async with running_server(lambda _: say("x"), guards=guards) as server:
        error = (await server.http.get("/health", headers={"Host": "evil.example"})).json()["error"]
    assert (error["code"], "SSD_ALLOWED_HOSTS" in error["message"]) == ("host_not_allowed", True)
    assert "'evil.example'" in error["message"]


@pytest.mark.parametrize(
    ("settings", "loopback"),
    [
        (Settings(), False),
        (Settings(api_key="sesame"), True),
        (Settings(allowed_hosts="*"), True),
    ],
)
async def test_host_check_is_off_with_keys_or_public_addresses(settings: Settings, loopback: bool) -> None:
    assert allowed_hosts(settings, loopback) is None


@pytest.mark.parametrize("value", ["https://a.example", "a.example:80", "a b", ","])
async def test_allowed_hosts_rejects_invalid_names(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_ALLOWED_HOSTS", value)
    with pytest.raises(SettingsError, match="is no host name"):
        resolve({})


@given(
    host=st.from_regex(r"[a-z0-9.-]{1,20}[a-z0-9]", fullmatch=True),
    port=st.sampled_from(["", ":", ":80", ":65535"]),
)
def test_host_name_without_port_and_brackets(host: str, port: str) -> None:
    assert host_name(host.upper() + port) == host
    assert host_name(f"[{host}]{port}") == host
