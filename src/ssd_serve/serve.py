"""`ssd serve`: the port, the processes, the HTTP server, and what ends them, put together.

Knows who has to start in which order; the parts know their work.
"""

import asyncio
import ipaddress
import math
import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import setproctitle
from rich.console import Console

from ssd_serve.cluster.channel import Channel
from ssd_serve.cluster.engines import RunningEngine, start_engine
from ssd_serve.devices import pin_cores
from ssd_serve.finding import find_models
from ssd_serve.listening import NotYet, listen
from ssd_serve.logs import carry_library_logs, get_logger
from ssd_serve.models.detokenize import DetokenizeStream
from ssd_serve.models.tokenizer import Tokenizer
from ssd_serve.server.banner import show_banner
from ssd_serve.server.engine_client import EngineClient
from ssd_serve.server.serving import HttpServer, build_server
from ssd_serve.server.tls import tls_context
from ssd_serve.settings import Settings
from ssd_serve.terminal import ProgressLine

_LOOK_EVERY_S = 0.1
_FAREWELL_S = 0.5
"""Between the engine's death and the server's: time for running requests to be told."""
_COMES_BACK_S = math.inf
"""The launcher says sooner when no engine will come back."""
_TERMINATED = 128 + signal.SIGTERM


class ServingTokenizer:
    """The model's tokenizer as the server wants it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an output unless they are ignored."""
        return self._tokenizer.eos_token_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self._tokenizer.decode(ids, skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as one text."""
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt, **variables)

    def detokenizer(self, context: Sequence[int] = (), skip_special_tokens: bool = True) -> DetokenizeStream:
        """A fresh incremental decoder of what follows `context`."""
        return self._tokenizer.stream(context, skip_special_tokens)


class ServingClient(EngineClient):
    """Gets the next engine from the launcher, and tells it that the end is meant, when it is."""

    def __init__(self, channel: Channel, engine: RunningEngine) -> None:
        super().__init__(
            channel,
            lambda: engine.connect(_COMES_BACK_S),
            engine.target_is_ready,
            engine.suspect_verifier,
            on_explained=engine.deaths_are_explained,
        )
        self._engine = engine

    def stop(self) -> None:
        """Abort what runs and close the channel."""
        self._engine.expect_end()
        super().stop()


def run_serve(settings: Settings) -> int:
    """Serve until a signal says stop, or the engine dies."""
    setproctitle.setproctitle("ssd: server")
    signal.signal(signal.SIGTERM, _leave_tidily)
    log = get_logger("server", settings.log_level, settings.log_format)
    carry_library_logs(log)
    line = ProgressLine()
    tls = tls_context(settings)
    with listen(settings.host, settings.port) as sock:
        if settings.api_key is None and not ipaddress.ip_address(sock.getsockname()[0]).is_loopback:
            log.warning(
                "anybody who reaches this address may use the model; set SSD_API_KEY", host=settings.host
            )
        with NotYet(sock, tls) as not_yet:
            found = find_models(settings, line.show, log.warning)
            tokenizer = ServingTokenizer(Tokenizer(found.target))
            line.show("starting")
            with start_engine(found.settings, log) as engine:
                # After the workers: they would inherit the binding.
                pin_cores(engine.placement.front_end)
                client = ServingClient(engine.connect(), engine)
                server = build_server(engine.settings, client, tokenizer)
                not_yet.stop()
                asyncio.run(_serve(server, sock, client, engine, line))
                if engine.failure is not None:
                    raise engine.failure
    log.info("stopped")
    return 0


async def _serve(
    server: HttpServer, sock: socket.socket, client: EngineClient, engine: RunningEngine, line: ProgressLine
) -> None:
    """Answer requests from the start (503 while loading), and watch the engine beside it."""
    watching = asyncio.create_task(_watch(server, sock, client, engine, line))
    try:
        await server.serve(sockets=[sock])
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(
    server: HttpServer, sock: socket.socket, client: EngineClient, engine: RunningEngine, line: ProgressLine
) -> None:
    announced = False
    while engine.failure is None:
        if not announced and client.ready is not None:
            announced = True
            line.clear()
            url = address(sock, engine.settings.tls_certificate is not None)
            show_banner(Console(), client.ready, engine.settings, url, program_name())
        elif not announced:
            line.show(client.progress)
        await asyncio.sleep(_LOOK_EVERY_S)
    line.clear()
    await asyncio.sleep(_FAREWELL_S)
    server.stop()


def program_name() -> str:
    """How to call the command line that this process came from: `ssd` where a shell finds it."""
    here = Path(sys.argv[0])
    if here.name != "ssd" or shutil.which("ssd") == str(here):
        return "ssd"
    return os.path.relpath(here) if here.is_relative_to(Path.cwd()) else str(here)


def address(sock: socket.socket, encrypted: bool = False) -> str:
    """Where people of this machine reach the server."""
    name = sock.getsockname()
    host, port = str(name[0]), int(name[1])
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _leave_tidily(_number: int, _frame: FrameType | None) -> NoReturn:
    """SIGTERM before or after serving: leave through every `finally`, so that workers and sockets go too."""
    raise SystemExit(_TERMINATED)
