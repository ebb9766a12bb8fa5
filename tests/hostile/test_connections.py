"""Tests of silent, slow and too many connections, during a stream of another client."""

import contextlib
import socket
import time
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest

from tests.hostile.target_server import TargetServer, start_target_server, wait_until_ready

FEW_DESCRIPTORS = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEAD_S, BODY_S, SLACK_S = 2.0, 3.0, 20.0
"""Deadlines of the server with short timeouts, and slack for a busy machine."""
SHORT_TIMEOUTS = f"""
import functools
from ssd_serve.server.http import serving
serving.Limits = functools.partial(serving.Limits, head_s={HEAD_S}, body_timeout_s={BODY_S})
"""


@pytest.fixture(scope="module")
def short_timeouts(tmp_path_factory: pytest.TempPathFactory) -> Generator[TargetServer]:
    with start_target_server(tmp_path_factory.mktemp("short"), before=SHORT_TIMEOUTS) as server:
        yield server


@contextlib.contextmanager
def attackers(server: TargetServer, count: int) -> Generator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(server.connect()) for _ in range(count)]


def drip(clients: list[socket.socket], data: bytes, seconds: float) -> list[bytes]:
    """Send a byte from each client every quarter of a second until all are closed; return the answers."""
    answers = dict.fromkeys(clients, b"")
    is_open = set(clients)
    deadline = time.monotonic() + seconds
    for client in clients:
        client.settimeout(0.0)
    for place in range(len(data)):
        for client in list(is_open):
            if not alive(client, data[place : place + 1], answers):
                is_open.remove(client)
        if not is_open:
            return list(answers.values())
        assert time.monotonic() < deadline, f"{len(is_open)} are still open"
        time.sleep(0.25)
    raise AssertionError("some connections stayed open")


def alive(client: socket.socket, data: bytes, answers: dict[socket.socket, bytes]) -> bool:
    try:
        client.send(data)
        while part := client.recv(4096):
            answers[client] += part
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    return False


def listens(server: TargetServer) -> bool:
    with socket.socket() as client:
        return client.connect_ex((server.host, server.port)) == 0


def test_slow_heads_are_disconnected(short_timeouts: TargetServer) -> None:
    endless = b"GET /health HTTP/1.1\r\n" + b"X-More: more\r\n" * 100
    with short_timeouts.unharmed(), attackers(short_timeouts, 40) as clients:
        drip(clients, endless, HEAD_S + SLACK_S)


def test_slow_bodies_are_answered_408_and_disconnected(short_timeouts: TargetServer) -> None:
    """The answer comes after the body timeout, and the end of the connection after twice that time."""
    with short_timeouts.unharmed(), attackers(short_timeouts, 20) as clients:
        for client in clients:
            client.sendall(HEAD + b"Content-Length: 100000\r\n\r\n")
        answers = drip(clients, b"[" * 1000, 2 * BODY_S + SLACK_S)
    assert {answer[:12] for answer in answers} == {b"HTTP/1.1 408"}


def test_more_idle_connections_than_descriptors_block_no_one_else(tmp_path: Path) -> None:
    """There are 1.5 times as many connections as descriptors of the process."""
    with start_target_server(tmp_path, before=FEW_DESCRIPTORS) as server:
        assert "limit=256" in server.log
        with server.unharmed(), contextlib.ExitStack() as stack:
            for _ in range(8):
                stack.enter_context(attackers(server, 48))
                assert httpx.get(f"{server.url}/health", timeout=30.0).status_code == 200
                assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200
        assert "out of system resource" not in server.log


def test_slow_connections_do_not_delay_model_loading(tmp_path: Path) -> None:
    with start_target_server(tmp_path, await_ready=False) as server, contextlib.ExitStack() as stack:
        deadline = time.monotonic() + 60.0
        while not listens(server):
            assert time.monotonic() < deadline, server.log
            time.sleep(0.05)
        clients = stack.enter_context(attackers(server, 20))
        for client in clients[:10]:
            client.sendall(HEAD + b"Content-Length: 8000000\r\n\r\n[")
        loading = httpx.get(f"{server.url}/health", timeout=30.0)
        assert (loading.status_code, loading.json()["error"]["code"]) == (503, "loading")
        for client in clients[10:]:
            client.sendall(b"GET /he")
        wait_until_ready(server)
