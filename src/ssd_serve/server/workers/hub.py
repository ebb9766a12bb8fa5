"""The server's end of its API workers: they ask here for what a server asks of an engine.

Knows requests by their numbers, and no text. Lives on the event loop of the process that has the engine.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import cast

from ssd_serve.transport.channel import Intake, SocketChannel
from ssd_serve.base.draft_messages import Message
from ssd_serve.base.errors import EngineDeadError, OverloadedError
from ssd_serve.server.workers.front_messages import (
    Applied,
    Begun,
    FromWorker,
    Hired,
    ListeningSocket,
    Lost,
    MetricsPage,
    MetricsWanted,
    Standing,
    ToWorker,
    carried,
)
from ssd_serve.base.messages import (
    Abort,
    Committed,
    Finish,
    Refused,
    Submit,
    SubmitChoices,
)
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.engine.event_channel import EngineLine
from ssd_serve.server.engine.submitted import Interrupted, Report, Submitted
from ssd_serve.server.observability.metrics_pages import API_WORKER, join_pages
from ssd_serve.server.workers.seat import Post, Seat, peer_pid

logger = logging.getLogger(__name__)

REQUESTS_OF_A_SEAT = 1_000_000_000
"""Numbers from one worker's first request to the next worker's, those that came back included."""
MAX_UNSENT = 1 << 16
"""Messages that wait for a worker which takes nothing."""
_INTAKE = Intake(kinds=FromWorker)
_TELL_EVERY_S = 0.2
_PAGES_WITHIN_S = 2.0
FIRST = "0"
"""The name of the server process among those that answer."""


class Hub:
    """One per server that has workers. `start` on the event loop."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._own_page: Callable[[], bytes] = bytes
        self._seats: list[Seat] = []
        self._post: Post | None = None
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hires = itertools.count(1)
        self._pages = itertools.count(1)
        self._answers: set[asyncio.Task[None]] = set()

    @property
    def workers(self) -> int:
        """Workers that answer."""
        return sum(seat.begun for seat in self._seats)

    def show(self, page: Callable[[], bytes]) -> None:
        """This process's page of metrics, which alone has the engine's."""
        self._own_page = page

    def start(self) -> None:
        """Begin to tell workers how the engine stands."""
        self._loop = asyncio.get_running_loop()
        self._engine.on_change = self._tell_all
        self._tell(self._loop)

    def offer(self, post: Post) -> None:
        """From now on workers are let in. On the event loop."""
        self._post = post

    def _welcome(self, channel: SocketChannel, loop: asyncio.AbstractEventLoop) -> None:
        line = EngineLine(
            channel, lambda messages: self._hear(seat, messages), lambda _reason: self._lose(seat)
        )
        seat = Seat(next(self._hires), channel, line, peer_pid(channel))
        self._seats.append(seat)
        line.start(loop)

    def _hire(self, seat: Seat, name: str) -> None:
        """Tell a worker what it needs to begin. Other processes of this user, such as a drafter that was
        taken over, are told nothing."""
        post = self._post
        known = post is not None and seat.pid in (None, post.pids().get(name))
        if post is None or not known:
            logger.warning("a process that is no worker is hung up on: %s", seat.pid)
            self._let_go(seat)
            return
        if not seat.channel.send_with(carried(ListeningSocket()), post.listening.fileno()):
            self._let_go(seat)
            return
        seat.name = name
        hired = Hired(
            settings=post.settings,
            folder=str(post.folder),
            salt_secret=post.salt_secret,
            first_request=seat.number * REQUESTS_OF_A_SEAT,
        )
        self._send(seat, hired)

    def close(self) -> None:
        """The server ends: workers take no more requests, and leave when theirs have ended."""
        self._closing = True
        if self._post is not None:
            self._post.expect_end()
        self._tell_all()

    async def left(self, within_s: float) -> None:
        """Until all workers have left, or the time is over."""
        deadline = asyncio.get_running_loop().time() + within_s
        while self.workers and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_TELL_EVERY_S / 4)

    async def pages(self) -> bytes:
        """One page of metrics of all processes; without those that do not answer in time."""
        asked = {seat.name: self._ask_page(seat) for seat in self._seats if seat.begun}
        if asked:
            _, late = await asyncio.wait(asked.values(), timeout=_PAGES_WITHIN_S)
            for page in late:
                page.cancel()
        found = {name: page.result() for name, page in asked.items() if page.done() and not page.cancelled()}
        # Reading them takes a while, in which tokens are handed on.
        return await asyncio.to_thread(join_pages, {FIRST: self._own_page().decode(), **found}, API_WORKER)

    def _ask_page(self, seat: Seat) -> asyncio.Future[str]:
        number = next(self._pages)
        page: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        seat.pages[number] = page
        page.add_done_callback(lambda _: seat.pages.pop(number, None))
        self._send(seat, MetricsWanted(number))
        return page

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        """Again and again, whatever goes wrong this time."""
        loop.call_later(_TELL_EVERY_S, self._tell, loop)
        self._tell_all()
        if self._post is not None and not self._closing:
            while (channel := self._post.door.accept(_INTAKE)) is not None:
                self._welcome(channel, loop)

    def _tell_all(self) -> None:
        for seat in list(self._seats):
            self._tell_one(seat)

    def _tell_one(self, seat: Seat) -> None:
        if not seat.begun:
            return
        engine = self._engine
        if engine.ready is not None and seat.ready is not engine.ready:
            seat.ready = engine.ready
            self._send(seat, engine.ready)
        if engine.status is not None and seat.status is not engine.status:
            seat.status = engine.status
            self._send(seat, engine.status)
        standing = Standing(
            target=engine.target,
            progress=engine.progress,
            active=engine.active,
            silent_s=engine.silent_s,
            lost_s=engine.lost_s,
            dead=engine.dead,
            restarts=engine.restarts,
            resumed=engine.resumed,
            closing=self._closing,
        )
        self._send(seat, standing)

    def _send(self, seat: Seat, message: ToWorker) -> None:
        """One that takes nothing for so long is let go: its clients would get nothing either."""
        if seat.line.closed:
            return
        if seat.line.waiting > MAX_UNSENT:
            logger.error("%s takes nothing, and is let go", seat.name)
            self._let_go(seat)
            return
        seat.line.send_soon(carried(message))

    def _hear(self, seat: Seat, messages: Sequence[Message]) -> None:
        for message in cast(Sequence[FromWorker], messages):
            if seat.line.closed:  # it was let go because of what came before
                return
            if isinstance(message, Submit | SubmitChoices):
                self._submit(seat, message)
            elif isinstance(message, Abort):
                seat.requests.discard(message.request)
                self._engine.abort(message.request)
            elif isinstance(message, Finish):
                self._engine.finish(message.request)
            elif isinstance(message, Applied):
                self._hire(seat, message.name)
            elif isinstance(message, Begun):
                seat.begun = True
                self._tell_one(seat)
            elif isinstance(message, MetricsWanted):
                self._answer(seat, message.number)
            else:
                page = seat.pages.get(message.number)
                if page is not None and not page.done():
                    page.set_result(message.text)

    def _submit(self, seat: Seat, message: Submit | SubmitChoices) -> None:
        """All of a message or none of it; what a server would be told by an exception is a report here."""
        submits = [message] if isinstance(message, Submit) else message.each()
        numbers = [each.request for each in submits]
        made = [
            Submitted(each, partial(self._report, seat, each.request), list(each.output)) for each in submits
        ]
        seat.requests.update(numbers)
        try:
            self._engine.take(made)
        except EngineDeadError as error:
            self._refuse(seat, [Lost(number, str(error)) for number in numbers])
        except OverloadedError as error:
            refused = [Refused(number, str(error), retry_after_s=error.retry_after_s) for number in numbers]
            self._refuse(seat, refused)

    def _refuse(self, seat: Seat, refusals: Sequence[Lost | Refused]) -> None:
        for each in refusals:
            seat.requests.discard(each.request)
            self._send(seat, each)

    def _report(self, seat: Seat, request: int, report: Report) -> None:
        if isinstance(report, Interrupted):
            self._send(seat, Lost(request))
            return
        if isinstance(report, EngineDeadError):
            seat.requests.discard(request)
            self._send(seat, Lost(request, str(report)))
            return
        if not isinstance(report, Committed):
            seat.requests.discard(request)
        self._send(seat, report)

    def _answer(self, seat: Seat, number: int) -> None:
        async def answer() -> None:
            page = await self.pages()
            self._send(seat, MetricsPage(number, page.decode()))

        task = asyncio.ensure_future(answer())
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    def _let_go(self, seat: Seat) -> None:
        """It would end by itself when it notices; one that hangs does not."""
        seat.line.close()
        if seat.begun and seat.pid is not None and self._post is not None:
            self._post.kill(seat.pid)
        self._lose(seat)

    def _lose(self, seat: Seat) -> None:
        """A worker is gone, and with it the clients of its requests."""
        with suppress(ValueError):
            self._seats.remove(seat)
        if seat.begun and not self._closing:
            logger.warning("%s is gone; requests of it that ran: %d", seat.name, len(seat.requests))
        for page in list(seat.pages.values()):
            page.cancel()
        for request in seat.requests:
            self._engine.abort(request)
        seat.requests.clear()
