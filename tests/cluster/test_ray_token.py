"""Tests of Ray's token: set before Ray is imported, unless the user has one; a warning without a token."""

import socket
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest

from ssd_serve.base.logs import Logger
from ssd_serve.cluster.ray.cluster import answers_without_token, prepare_token, warn_without_token

grpc: Any = pytest.importorskip("grpc")
TOKEN = "what the user chose"


@pytest.fixture(autouse=True)
def ray_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)


def prepared(given: dict[str, str], *, joining: bool) -> dict[str, str]:
    environment = dict(given)
    prepare_token(environment, joining=joining)
    return environment


def test_own_ray_gets_a_random_token() -> None:
    first, second = prepared({}, joining=False), prepared({}, joining=False)
    assert first["RAY_AUTH_MODE"] == "token"
    assert len(first["RAY_AUTH_TOKEN"]) == 64
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]


@pytest.mark.parametrize("joining", [False, True])
@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_token_of_the_user_is_kept(name: str, joining: bool) -> None:
    assert prepared({name: TOKEN}, joining=joining) == {name: TOKEN, "RAY_AUTH_MODE": "token"}


def test_joining_without_a_token_sets_nothing() -> None:
    assert prepared({}, joining=True) == {}


@pytest.mark.parametrize("joining", [False, True])
def test_disabled_ray_token_stays_disabled(joining: bool) -> None:
    assert prepared({"RAY_AUTH_MODE": "disabled"}, joining=joining) == {"RAY_AUTH_MODE": "disabled"}


def test_imported_ray_gets_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    assert prepared({}, joining=False) == {}


@contextmanager
def directory(*, asks_for_token: bool) -> Generator[str]:
    """Serve one answer at a free port, as Ray's GCS would."""

    def answer(_request: bytes, context: Any) -> bytes:
        if asks_for_token:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return b""

    handlers = {"CheckAlive": grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", handlers)]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def warned(address: str) -> str:
    out = StringIO()
    context = SimpleNamespace(gcs_address=address)
    warn_without_token(SimpleNamespace(get_runtime_context=lambda: context), Logger("server", stream=out))
    return out.getvalue()


def test_cluster_without_a_token_causes_a_warning() -> None:
    with directory(asks_for_token=False) as address:
        assert answers_without_token(address)
        assert "RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN" in warned(address)


def test_cluster_with_a_token_causes_no_warning() -> None:
    with directory(asks_for_token=True) as address:
        assert not answers_without_token(address)
        assert warned(address) == ""


def test_unreachable_ray_address_gives_no_warning() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert warned(address) == ""
