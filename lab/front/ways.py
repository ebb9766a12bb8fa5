"""Ways to run a front end: whose event loop, and whose parser of HTTP.

The server runs asyncio's and h11. The others are here to be compared, and are installed by hand.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Literal

from uvicorn.config import Config
from uvicorn.server import ServerState

from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.http.connections import Crowd
from ssd_serve.server.http.door import Door
from ssd_serve.server.http.serving import HttpServer, build_server
from ssd_serve.server.limits import Limits
from ssd_serve.server.service import StopGate
from ssd_serve.server.text.serving_tokenizer import ServingTokenizer
from ssd_serve.settings import Settings

Loop = Literal["asyncio", "uvloop"]
Parser = Literal["h11", "httptools"]


@dataclass(frozen=True, slots=True)
class FrontWay:
    """One of them."""

    loop: Loop
    parser: Parser

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """To its end."""
        if self.loop == "asyncio":
            asyncio.run(work)
            return
        import uvloop

        uvloop.run(work)

    def server(self, settings: Settings, client: EngineClient, texts: ServingTokenizer) -> HttpServer:
        """The server, or one with connections that know no bounds."""
        server = build_server(settings, client, texts)
        if self.parser == "h11":
            return server
        door = _UnboundedDoor(Crowd(1 << 16), Limits(), None)
        return HttpServer(server.config, StopGate(), client.stop, 1.0, door)


class _UnboundedDoor(Door):
    def welcome(self, config: Config, state: ServerState, app_state: dict[str, Any]) -> asyncio.Protocol:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

        return HttpToolsProtocol(config, state, app_state)
