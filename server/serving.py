"""Runs the application on a bound socket until a signal says stop.

Knows uvicorn and signals; the application is built elsewhere.
"""

import asyncio
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from ssd_serve.server.app import create_app
from ssd_serve.server.engine_client import EngineClient
from ssd_serve.server.limits import Limits
from ssd_serve.server.service import Gate
from ssd_serve.server.tokenizer import TextTokenizer
from ssd_serve.settings import Settings

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class HttpServer(uvicorn.Server):
    """uvicorn, except that a handled signal is not raised again: the caller still has to tidy up."""

    def __init__(self, config: uvicorn.Config, gate: Gate) -> None:
        super().__init__(config)
        self._gate = gate

    def stop(self) -> None:
        """Take no more requests, let running ones end within the time limit, then return from `serve`."""
        self._gate.closed = True
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal does not wait any longer."""
        del sig, frame
        if self.should_exit:
            self.force_exit = True
        self.stop()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Listen to signals while serving, where that is possible (the main thread)."""
        try:
            before = {number: signal.signal(number, self.handle_exit) for number in STOP_SIGNALS}
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def build_server(
    settings: Settings, engine_client: EngineClient, tokenizer: TextTokenizer, limits: Limits | None = None
) -> HttpServer:
    """The server, not yet running; its `stop` may be called from any thread."""
    limits = limits or Limits()
    gate = Gate()
    app = create_app(settings, engine_client, tokenizer, limits, gate)
    config = uvicorn.Config(
        app,
        # The process's own logging is set up by whoever started it.
        log_config=None,
        log_level="info" if settings.log_level == "debug" else "warning",
        access_log=settings.log_level == "debug",
        server_header=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=max(1, round(limits.shutdown_s)),
    )
    return HttpServer(config, gate)


def serve(
    settings: Settings,
    engine_client: EngineClient,
    tokenizer: TextTokenizer,
    sock: socket.socket,
    limits: Limits | None = None,
) -> None:
    """Serve on a bound socket until SIGINT or SIGTERM. Returns normally after a tidy end."""
    server = build_server(settings, engine_client, tokenizer, limits)
    asyncio.run(server.serve(sockets=[sock]))
