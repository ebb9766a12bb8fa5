"""A key is asked for by the path of the request line alone, however path and Host are written."""

import socket

import pytest

from ssd_serve.base.settings import Settings
from tests.server.fakes import say
from tests.server.running_server import listening_server

KEY = "a-key-of-some-length"
WAYS = [
    ("/v1/models", "localhost/health?"),
    ("/v1/models", "localhost/health#"),
    ("/v1/models", "health"),
    ("/v1/models?/health", "localhost"),
    ("/v1/models#/health", "localhost"),
    ("/health/../v1/models", "localhost"),
    ("/health%2f..%2fv1/models", "localhost"),
    ("/v1/models/%2e%2e/%2e%2e/health", "localhost"),
    ("/health;/v1/models", "localhost"),
    ("//health", "localhost"),
    ("/health/", "localhost"),
    ("/Health", "localhost"),
    ("/health%00", "localhost"),
    ("http://localhost/v1/models", "localhost"),
    ("http://localhost/health", "localhost"),
    ("v1/models", "localhost"),
]


def status(port: int, target: str, host: str) -> int:
    """The status of a GET without a key."""
    with socket.create_connection(("127.0.0.1", port), 10) as client:
        client.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        with client.makefile("rb") as answer:
            return int(answer.readline().split()[1])


@pytest.mark.parametrize("root", [None, "/llm"])
def test_no_path_bypasses_auth(root: str | None) -> None:
    settings = Settings(drain_seconds=1, api_key=KEY, root_path=root)
    with listening_server(lambda _: say("x"), settings) as address:
        port = int(address.url.rpartition(":")[2])
        assert status(port, "/health", "localhost") == 200, "open, whoever asks"
        assert {(way, status(port, *way)) for way in WAYS} <= {
            (way, code) for way in WAYS for code in (400, 401)
        }
