"""Runs the application on a bound socket until a signal says stop.

Knows uvicorn and signals; the application is built elsewhere.
"""

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from functools import partial
from types import FrameType

import uvicorn
from starlette.middleware import Middleware

from ssd_serve.base.descriptors import descriptor_limit
from ssd_serve.server.access.hosts import AllowedHosts
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.http.app import create_app
from ssd_serve.server.http.connections import Crowd, CrowdControl
from ssd_serve.server.http.door import Door, max_connections, open_door
from ssd_serve.server.http.tls import tls_context
from ssd_serve.server.limits import Limits
from ssd_serve.server.service import StopGate
from ssd_serve.server.text.tokenizer import TextTokenizer
from ssd_serve.base.settings import Settings

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_EVERY_S = 0.1
_LAST_WORDS_S = 2
"""Seconds for clients to take the answer that their requests were ended with."""
SAME_SIGNAL_S = 1.0
"""A signal to a process group arrives twice where a parent in the group (make, a shell) passes it on."""


class HttpServer(uvicorn.Server):
    """uvicorn, except that a handled signal is not raised again: the caller still has to tidy up."""

    def __init__(
        self,
        config: uvicorn.Config,
        gate: StopGate,
        end: Callable[[], None],
        drain_s: float,
        door: Door,
    ) -> None:
        """`end` ends all requests with an error; it is called when they had `drain_s` to end well."""
        super().__init__(config)
        self._door = door
        self._gate = gate
        self._end = end
        self._drain_s = drain_s
        self._told_at = 0.0
        self._hurry = False

    def stop(self) -> None:
        """Take no more requests, let running ones end within the time limit, then return from `serve`."""
        if not self.should_exit:
            self._told_at = time.monotonic()
        self._gate.closed = True
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A later second signal does not wait any longer."""
        del sig, frame
        if self.should_exit and time.monotonic() - self._told_at > SAME_SIGNAL_S:
            self._hurry = True
        self.stop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, but whoever comes to the sockets comes through the door."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise RuntimeError("the application did not start")
        welcome = partial(self._door.welcome, self.config, self.server_state, self.lifespan.state)
        self.servers = [await open_door(welcome, sock) for sock in sockets or []]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests end, end the others with an answer, and close the port last: as long as requests
        run, new ones are told that this server ends. uvicorn would close it first and only cut off."""
        await self._drain()
        self._end()
        await super().shutdown(sockets)
        self._door.crowd.dismiss()
        await asyncio.sleep(0)  # they close when the loop comes to it

    async def _drain(self) -> None:
        """Wait for what ran when the signal came; what comes later is refused at once."""
        ran = set(self.server_state.tasks)
        while not self._hurry and ran & self.server_state.tasks:
            if time.monotonic() - self._told_at >= self._drain_s:
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Listen to signals while serving, where that is possible (the main thread)."""
        try:
            before = {number: signal.signal(number, self.handle_exit) for number in heeded_signals()}
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def heeded_signals() -> list[signal.Signals]:
    """The signals that say stop; not the one that `nohup` has a program ignore, to outlive its terminal."""
    return [
        number
        for number in STOP_SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]


class ServerThread:
    """A server on an event loop of its own, which answers while this thread loads what it is to serve. Stops,
    as tidily as it can, at the end of the `with` block."""

    def __init__(self, server: HttpServer, socks: list[socket.socket]) -> None:
        self._server = server
        self._socks = socks
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def __enter__(self) -> "ServerThread":
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.stop()
        self._thread.join()

    def call(self, work: Callable[[], object]) -> None:
        """Let the event loop do something soon."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(work)

    def stop(self) -> None:
        """Let the server end as tidily as it can. From any thread."""
        self._server.stop()

    def ends_within(self, seconds: float) -> bool:
        """Wait so long for the server's end. Raises what ended it, if that was an error."""
        self._thread.join(seconds)
        if self._failure is not None:
            raise self._failure
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # it is raised where it is waited for
            self._failure = error
        finally:
            self._begun.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._begun.set)
        await self._server.serve(sockets=self._socks)


def build_server(
    settings: Settings,
    engine: EngineClient,
    tokenizer: TextTokenizer,
    limits: Limits | None = None,
    hosts: Collection[str] | None = None,
) -> HttpServer:
    """The server, not yet running; its `stop` may be called from any thread. `hosts`: the only names that it
    may be called by, beside loopback's."""
    limits = limits or Limits()
    gate = StopGate()
    crowd = Crowd(max_connections(settings, descriptor_limit()))
    guards = [Middleware(CrowdControl, crowd=crowd)]
    if hosts is not None:
        guards.append(Middleware(AllowedHosts, allowed=hosts))
    app = create_app(settings, engine, tokenizer, limits, gate, guards)
    config = uvicorn.Config(
        app,
        # Whatever other packages have brought: one parser of HTTP is tested.
        http="h11",
        # The process's own logging is set up by whoever started it.
        log_config=None,
        log_level="info" if settings.log_level == "debug" else "warning",
        access_log=settings.log_level == "debug",
        server_header=False,
        lifespan="on",
        ws="none",
        timeout_keep_alive=limits.keep_alive_s,
        timeout_graceful_shutdown=_LAST_WORDS_S,
    )
    door = Door(crowd, limits, tls_context(settings))
    return HttpServer(config, gate, engine.stop, settings.drain_seconds, door)


def serve(
    settings: Settings,
    engine: EngineClient,
    tokenizer: TextTokenizer,
    sock: socket.socket,
    limits: Limits | None = None,
) -> None:
    """Serve on a bound socket until SIGINT or SIGTERM. Returns normally after a tidy end."""
    server = build_server(settings, engine, tokenizer, limits)
    asyncio.run(server.serve(sockets=[sock]))
