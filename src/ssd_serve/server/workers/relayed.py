"""The engine as an API worker sees it: everything goes through the server process, which has the engine.

Knows neither HTTP nor text, and nothing of how engines are lost and found again: it is told.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import cast

from ssd_serve.base.draft_messages import Message
from ssd_serve.base.errors import EngineDeadError, OverloadedError
from ssd_serve.server.workers.front_messages import Begun, Lost, MetricsPage, MetricsWanted, Standing, ToWorker, carried
from ssd_serve.base.messages import (
    Abort,
    Committed,
    Finish,
    Finished,
    Ready,
    Refused,
    Status,
)
from ssd_serve.server.engine.event_channel import EngineLine, MessageChannel
from ssd_serve.server.engine.submitted import (
    Interrupted,
    Report,
    Submitted,
    Terms,
    Wanted,
    submissions,
    together,
)

_PAGE_WITHIN_S = 5.0


class RelayedEngine:
    """One per worker. `start` on the event loop, then `submit_all`."""

    def __init__(self, channel: MessageChannel, first_request: int) -> None:
        self._line = EngineLine(channel, self._hear, self._lost_server)
        self._numbers = itertools.count(first_request)
        self._pages = itertools.count(1)
        self._own_page: Callable[[], bytes] = bytes
        self.on_closing: Callable[[], None] = lambda: None
        """Is called when this process has to end: the server does, or has let it go."""
        self._running: dict[int, Submitted] = {}
        self._asked: dict[int, asyncio.Future[str]] = {}
        self._standing: Standing | None = None
        self._told_at = time.monotonic()
        self._others = 0
        """Requests of other processes, when they were last told."""
        self._started = False
        self._dead: str | None = None
        self.ready: Ready | None = None
        self.status: Status | None = None

    @property
    def active(self) -> int:
        """Requests of all processes that have not ended, as far as it is known."""
        return self._others + len(self._running)

    @property
    def target(self) -> str | None:
        return None if self._standing is None else self._standing.target

    @property
    def progress(self) -> str:
        return "" if self._standing is None else self._standing.progress

    @property
    def dead(self) -> str | None:
        return self._dead

    @property
    def restarts(self) -> int:
        return 0 if self._standing is None else self._standing.restarts

    @property
    def resumed(self) -> int:
        return 0 if self._standing is None else self._standing.resumed

    @property
    def silent_s(self) -> float:
        return self._since(0.0 if self._standing is None else self._standing.silent_s)

    @property
    def lost_s(self) -> float | None:
        standing = self._standing
        return None if standing is None or standing.lost_s is None else self._since(standing.lost_s)

    def start(self) -> None:
        if not self._started:
            self._started = True
            self._told_at = time.monotonic()
            self._line.start(asyncio.get_running_loop())
            self._send(Begun())

    def stop(self) -> None:
        for request in self._running:
            self._line.send_surely(Abort(request=request))
        self._die("the server is shutting down")

    def submit_all(
        self, wanted: Sequence[Wanted], salt: bytes = b"", priority: int = 0, max_nodes: int | None = None
    ) -> list[int]:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        made = submissions(wanted, Terms(salt, priority, max_nodes), self._numbers)
        if not self._line.send_all(together(each.first for each in made)):
            raise OverloadedError("the server does not take requests fast enough", retry_after_s=1.0)
        self._running.update({each.first.request: each for each in made})
        return [each.first.request for each in made]

    def show(self, page: Callable[[], bytes]) -> None:
        """This process's page of metrics."""
        self._own_page = page

    def abort(self, request: int) -> None:
        if self._running.pop(request, None) is not None:
            self._line.send_surely(Abort(request=request))

    def finish(self, request: int) -> None:
        if request in self._running:
            self._line.send_surely(Finish(request=request))

    async def pages(self) -> bytes:
        """The page of metrics of all processes; this one's own where the server tells none."""
        if self._line.closed:
            return self._own_page()
        number = next(self._pages)
        page: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked[number] = page
        self._send(MetricsWanted(number))
        try:
            return (await asyncio.wait_for(page, _PAGE_WITHIN_S)).encode()
        except TimeoutError:
            return self._own_page()
        finally:
            del self._asked[number]

    def _since(self, told_s: float) -> float:
        return told_s + time.monotonic() - self._told_at

    def _send(self, message: Begun | MetricsWanted | MetricsPage) -> None:
        self._line.send_surely(carried(message))

    def _hear(self, messages: Sequence[Message]) -> None:
        for message in cast(Sequence[ToWorker], messages):
            self._dispatch(message)

    def _dispatch(self, message: ToWorker) -> None:
        if isinstance(message, Committed):
            submitted = self._running.get(message.request)
            if submitted is not None:
                submitted.deliver(message)
        elif isinstance(message, Finished | Refused):
            self._end(message.request, message)
        elif isinstance(message, Lost):
            self._lose(message)
        elif isinstance(message, Status):
            self.status = message
        elif isinstance(message, Ready):
            self.ready = message
        elif isinstance(message, Standing):
            self._stand(message)
        elif isinstance(message, MetricsWanted):
            self._send(MetricsPage(message.number, self._own_page().decode()))
        elif isinstance(message, MetricsPage):
            page = self._asked.get(message.number)
            if page is not None and not page.done():
                page.set_result(message.text)

    def _lose(self, lost: Lost) -> None:
        if lost.reason is not None:
            self._end(lost.request, EngineDeadError(lost.reason))
        elif lost.request in self._running:
            self._running[lost.request].deliver(Interrupted())

    def _end(self, request: int, report: Report) -> None:
        submitted = self._running.pop(request, None)
        if submitted is not None:
            submitted.deliver(report)

    def _stand(self, standing: Standing) -> None:
        before, self._standing = self._standing, standing
        self._told_at = time.monotonic()
        self._others = max(0, standing.active - len(self._running))
        if standing.lost_s is not None:
            self.status = None  # no gauge tells of what is gone
        if standing.dead is not None:
            self._die(standing.dead)
        if standing.closing and not (before is not None and before.closing):
            self.on_closing()

    def _lost_server(self, reason: str) -> None:
        self._die(reason)
        self.on_closing()

    def _die(self, reason: str) -> None:
        """The line stays: its end tells the server that this process has said its last words."""
        if self._dead is not None:
            return
        self._dead = reason
        running, self._running = self._running, {}
        for submitted in running.values():
            submitted.deliver(EngineDeadError(reason))
