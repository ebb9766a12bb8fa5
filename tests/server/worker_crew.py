"""A scripted engine, the process that has it, and API workers beside it, all on one event loop."""

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from ssd_serve.transport.channel import Intake, SocketChannel
from ssd_serve.server.workers.front_messages import FromWorker, Hired, ToWorker
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.engine.interface import ServedEngine
from ssd_serve.server.http.app import create_app
from ssd_serve.server.service import Company
from ssd_serve.server.workers.hub import Hub
from ssd_serve.server.workers.process import apply_for_work
from ssd_serve.server.workers.relayed import RelayedEngine
from ssd_serve.server.workers.seat import Post
from ssd_serve.base.settings import Settings
from tests.server.fakes import READY, ByteTokenizer, FakeEngine, Playwright, channel_pair

SALT_SECRET = b"a secret of these tests"


@dataclass
class Entrance:
    """Where workers come in, without a file."""

    waiting: list[SocketChannel] = field(default_factory=list[SocketChannel])

    def accept(self, intake: Intake) -> SocketChannel | None:
        del intake
        return self.waiting.pop(0) if self.waiting else None


@dataclass(frozen=True)
class Hand:
    """A worker: its clients' door, its engine, and what it was hired with."""

    http: httpx.AsyncClient
    engine: RelayedEngine
    channel: SocketChannel
    hired: Hired


@dataclass(frozen=True)
class Crewed:
    """The server process, and its workers."""

    http: httpx.AsyncClient
    engine: FakeEngine
    client: EngineClient
    hub: Hub
    hands: Sequence[Hand]
    entrance: Entrance
    killed: Sequence[int]
    """Processes that were ended because they hang."""


def worker_ends() -> tuple[SocketChannel, SocketChannel]:
    """The server's end of a connection, and the worker's."""
    one, other = socket.socketpair()
    here = SocketChannel(one, queue_bytes=1 << 16, intake=Intake(kinds=FromWorker))
    return here, SocketChannel(other, intake=Intake(kinds=ToWorker, descriptors=True))


@asynccontextmanager
async def open_app(
    engine: ServedEngine, settings: Settings, company: Company
) -> AsyncGenerator[httpx.AsyncClient]:
    app = create_app(settings, engine, ByteTokenizer(), company=company)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://house") as http:
            yield http


@asynccontextmanager
async def open_crew(
    playwright: Playwright, settings: Settings | None = None, workers: int = 2
) -> AsyncGenerator[Crewed]:
    """All of them, once each can generate."""
    settings = settings or Settings(api_workers=workers + 1)
    ours, theirs = channel_pair()
    engine = FakeEngine(theirs, playwright)
    engine.tell(READY)
    engine.start()
    client = EngineClient(ours)
    hub, entrance, killed = Hub(client), Entrance(), list[int]()
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            open_app(client, settings, Company(hub.pages, hub.show, SALT_SECRET))
        )
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        told = settings.model_dump_json().encode()
        pids = {f"api-{number + 1}": os.getpid() for number in range(workers)}
        post = Post(entrance, lambda: pids, killed.append, lambda: None, listening, told, Path(), SALT_SECRET)
        hub.offer(post)
        hub.start()
        hands: list[Hand] = []
        for number in range(workers):
            here, there = worker_ends()
            entrance.waiting.append(here)
            hired, listens = await asyncio.to_thread(apply_for_work, there, f"api-{number + 1}")
            listens.close()
            relayed = RelayedEngine(there, hired.first_request)
            company = Company(relayed.pages, relayed.show, hired.salt_secret, tells_engine=False)
            of_worker = await stack.enter_async_context(
                open_app(relayed, Settings.model_validate_json(hired.settings), company)
            )
            hands.append(Hand(of_worker, relayed, there, hired))
        while any(hand.engine.ready is None for hand in hands):
            await asyncio.sleep(0.01)
        yield Crewed(http, engine, client, hub, hands, entrance, killed)
        for hand in hands:
            hand.channel.close()
    engine.die()
