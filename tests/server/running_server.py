"""Servers with a scripted engine: `running_server` in this process, `listening_server` on a socket."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.middleware import Middleware

from ssd_serve.base.messages import Ready
from ssd_serve.base.settings import Settings
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.http.app import create_app
from ssd_serve.server.http.listening import listen
from ssd_serve.server.http.serving import build_server
from ssd_serve.server.limits import Limits
from ssd_serve.server.service import StopGate
from ssd_serve.server.text import TextTokenizer
from tests.server.contract import Contract
from tests.server.fakes import PATIENCE_S, READY, ByteTokenizer, FakeEngine, ScriptOf, channel_pair


@dataclass(frozen=True)
class RunningServer:
    http: httpx.AsyncClient
    engine: FakeEngine
    client: EngineClient
    app: FastAPI
    gate: StopGate
    contract: Contract


@asynccontextmanager
async def running_server(
    script_of: ScriptOf,
    settings: Settings | None = None,
    limits: Limits | None = None,
    *,
    ready: bool = True,
    model: Ready = READY,
    tokenizer: TextTokenizer | None = None,
    guards: Sequence[Middleware] = (),
) -> AsyncGenerator[RunningServer, None]:
    ours, theirs = channel_pair()
    engine = FakeEngine(theirs, script_of)
    if ready:
        engine.tell(model)
    engine.start()
    client, gate, chosen = EngineClient(ours), StopGate(), tokenizer or ByteTokenizer()
    settings = settings or Settings()
    app = create_app(settings, client, lambda: chosen, limits, gate, guards=guards)
    contract = Contract(app, app.openapi(), settings.root_path)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=contract, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            while ready and client.ready is None:
                await asyncio.sleep(0.002)
            yield RunningServer(http, engine, client, app, gate, contract)
    engine.die()
    assert contract.broken == []


@dataclass(frozen=True)
class ListeningServer:
    url: str
    engine: FakeEngine
    stop: Callable[[], None]
    stopped: threading.Event
    contract: Contract


@contextmanager
def listening_server(
    script_of: ScriptOf,
    settings: Settings | None = None,
    limits: Limits | None = None,
    *,
    ready: bool = True,
    send_buffer: int | None = None,
) -> Generator[ListeningServer, None, None]:
    ours, theirs = channel_pair()
    engine = FakeEngine(theirs, script_of)
    if ready:
        engine.tell(READY)
    engine.start()
    sock = listen("127.0.0.1", 0)
    if send_buffer is not None:  # connections inherit it
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    port: int = sock.getsockname()[1]
    settings = settings or Settings(drain_seconds=1)
    server = build_server(settings, EngineClient(ours), ByteTokenizer, limits)
    app = server.config.app
    assert isinstance(app, FastAPI)
    contract = server.config.app = Contract(app, app.openapi(), settings.root_path)
    stopped = threading.Event()

    def live() -> None:
        asyncio.run(server.serve(sockets=[sock]))
        stopped.set()

    thread = threading.Thread(target=live, name="server")
    thread.start()
    url = f"{'http' if settings.tls_key is None else 'https'}://127.0.0.1:{port}"
    try:
        wait_until_healthy(url, 200 if ready else 503)
        yield ListeningServer(url, engine, server.stop, stopped, contract)
    finally:
        server.stop()
        thread.join(PATIENCE_S)
        engine.die()
        sock.close()
    assert contract.broken == []


def wait_until_healthy(url: str, status: int = 200) -> None:
    deadline = time.monotonic() + PATIENCE_S
    with httpx.Client(verify=False) as client:
        while time.monotonic() < deadline:
            with suppress(httpx.TransportError):
                if client.get(f"{url}/health", headers={"Connection": "close"}).status_code == status:
                    return
            time.sleep(0.01)
    raise AssertionError("the server did not become healthy")


async def post(server: RunningServer, path: str, **body: object) -> dict[str, Any]:
    answer = await server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def events(server: RunningServer, path: str, **body: object) -> list[dict[str, Any]]:
    answer = await server.http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert found[-1] == "[DONE]"
    return [json.loads(line) for line in found[:-1]]
