"""Runs the application on bound sockets, with uvicorn, until a signal or `stop`."""

import asyncio
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.middleware import Middleware

from ssd_serve.base.resources import descriptor_limit
from ssd_serve.base.settings import Settings
from ssd_serve.server.access.auth import AllowedHosts
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.http.app import create_app
from ssd_serve.server.http.connections import (
    BoundedConnection,
    ConnectionLimiter,
    ConnectionLimitMiddleware,
    TlsHandshake,
)
from ssd_serve.server.http.listening import accept_connections, max_connections, tls_context
from ssd_serve.server.limits import Limits
from ssd_serve.server.service import StopGate
from ssd_serve.server.text import TextTokenizer

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.1
_LAST_ANSWERS_S = 2
"""Seconds for clients to read the errors of requests that were aborted at the end."""
SAME_SIGNAL_S = 1.0
"""A signal to a process group arrives twice if a parent in the group (make, a shell) passes it on."""


class HttpServer(uvicorn.Server):
    """uvicorn with limited connections; it does not raise handled signals again, so the caller can clean up."""

    def __init__(
        self,
        config: uvicorn.Config,
        gate: StopGate,
        abort_requests: Callable[[], None],
        drain_s: float,
        limiter: ConnectionLimiter,
        limits: Limits,
        tls: ssl.SSLContext | None,
    ) -> None:
        """`abort_requests` ends all requests with an error, `drain_s` seconds after `stop` at the latest."""
        super().__init__(config)
        self._limiter = limiter
        self._limits = limits
        self._tls = tls
        self._gate = gate
        self._abort_requests = abort_requests
        self._drain_s = drain_s
        self._stopped_at = 0.0
        self._hurry = False

    def stop(self) -> None:
        """Refuse new requests, let running ones end within the time limit, then return from `serve`."""
        if not self.should_exit:
            self._stopped_at = time.monotonic()
        self._gate.closed = True
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; a second signal, later, ends the wait for running requests."""
        del sig, frame
        if self.should_exit and time.monotonic() - self._stopped_at > SAME_SIGNAL_S:
            self._hurry = True
        self.stop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and accept connections with this server's protocol instead of uvicorn's."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise RuntimeError("the application did not start")
        self.servers = [await accept_connections(self._make_protocol, sock) for sock in sockets or []]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests end, abort the others with an error, and close the port last.

        While requests run, new ones get an answer that the server stops; uvicorn would close the port first.
        """
        await self._drain()
        self._abort_requests()
        await super().shutdown(sockets)
        self._limiter.abort_all()
        await asyncio.sleep(0)  # aborted connections close in the next iteration of the event loop

    def _make_protocol(self) -> asyncio.Protocol:
        if self._tls is None:
            return self._http_protocol()
        return TlsHandshake(self._tls, self._limiter, self._limits.head_s, self._http_protocol)

    def _http_protocol(self) -> asyncio.Protocol:
        state = self.lifespan.state
        return BoundedConnection(self.config, self.server_state, state, self._limiter, self._limits)

    async def _drain(self) -> None:
        running = set(self.server_state.tasks)
        while not self._hurry and running & self.server_state.tasks:
            if time.monotonic() - self._stopped_at >= self._drain_s:
                return
            await asyncio.sleep(_POLL_S)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle stop signals while serving, if this is the main thread."""
        try:
            before = {number: signal.signal(number, self.handle_exit) for number in stop_signals()}
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop the server, without SIGHUP if `nohup` has set it to be ignored."""
    return [
        number
        for number in _STOP_SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]


class ServerThread:
    """Runs a server on its own thread and event loop while this thread loads the model.

    The end of the `with` block stops the server.
    """

    def __init__(self, server: HttpServer, socks: list[socket.socket]) -> None:
        self._server = server
        self._socks = socks
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def __enter__(self) -> "ServerThread":
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.stop()
        self._thread.join()

    def call(self, work: Callable[[], object]) -> None:
        """Run `work` on the server's event loop soon."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(work)

    def ends_within(self, seconds: float) -> bool:
        """Wait so long for the server's end. Raises the error that ended it, if any."""
        self._thread.join(seconds)
        if self._failure is not None:
            raise self._failure
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # `ends_within` raises it
            self._failure = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._started.set)
        await self._server.serve(sockets=self._socks)


def build_server(
    settings: Settings,
    engine: EngineClient,
    tokenizer: Callable[[], TextTokenizer],
    limits: Limits | None = None,
    hosts: Collection[str] | None = None,
) -> HttpServer:
    """Return a server that does not run yet; any thread may call its `stop`.

    `hosts`: the only host names that it answers to, in addition to loopback's; None: any name.
    """
    limits = limits or Limits()
    gate = StopGate()
    limiter = ConnectionLimiter(max_connections(settings, descriptor_limit()))
    guards = [Middleware(ConnectionLimitMiddleware, limiter=limiter)]
    if hosts is not None:
        guards.append(Middleware(AllowedHosts, allowed=hosts))
    app = create_app(settings, engine, tokenizer, limits, gate, guards)
    config = uvicorn.Config(
        app,
        # The only HTTP parser that is tested, even if other packages install another.
        http="h11",
        # The process that runs the server sets up logging.
        log_config=None,
        log_level="info" if settings.log_level == "debug" else "warning",
        access_log=settings.log_level == "debug",
        server_header=False,
        lifespan="on",
        ws="none",
        timeout_keep_alive=limits.keep_alive_s,
        timeout_graceful_shutdown=_LAST_ANSWERS_S,
    )
    tls = tls_context(settings)
    return HttpServer(config, gate, engine.stop, settings.drain_seconds, limiter, limits, tls)
