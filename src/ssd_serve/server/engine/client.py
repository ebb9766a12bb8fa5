"""The server's end of the connection to the verifier process.

Sends Submit, Abort and Finish, and hands reports to the submitter of each request. When the verifier dies,
running requests are submitted again to its successor. Lives on one event loop and never blocks it. Knows
nothing about HTTP or text.
"""

import asyncio
import itertools
import logging
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from ssd_serve.base.draft_messages import PROTOCOL_VERSION, Message
from ssd_serve.base.errors import EngineDeadError, OverloadedError, RequestError, in_a_line
from ssd_serve.base.messages import Abort, Committed, Finish, Finished, Progress, Ready, Refused, Status
from ssd_serve.server.engine.connection import AsyncConnection
from ssd_serve.server.engine.inflight import (
    MAX_TOKENS,
    InflightRequest,
    Interrupted,
    Quarantine,
    group_choices,
    interrupt_all,
)
from ssd_serve.transport.channel import Channel

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 1.0


class Supervisor(Protocol):
    """Watches the engine's process and starts the next one, as the supervisor of a launcher does."""

    def target_is_ready(self) -> None:
        """Report an engine that can generate."""
        ...

    def suspect_verifier(self, silent_s: float) -> None:
        """Report every second that a ready engine has sent nothing for so long."""
        ...

    def deaths_are_explained(self) -> None:
        """Report that a request was found that kills engines."""
        ...

    def expect_end(self) -> None:
        """Report that the engine's end is intended."""
        ...


class Engine(Protocol):
    """A started engine, such as `RunningEngine`."""

    @property
    def supervisor(self) -> Supervisor: ...

    def connect(self, timeout_s: float) -> Channel:
        """Block until the next engine has a channel; raise `EngineDeadError` where none will come."""
        ...


class EngineClient:
    """Submits requests to one engine and its successors: `start`, then `submit`, then `stop`.

    `target` is the model's name with its commit, where known. `ready`, `status` and `progress` hold the
    latest message of each kind; `dead` is the reason once no engine will come. `restarts` counts engines
    after the first, `resumed` the requests that continued on another engine.
    """

    def __init__(
        self, channel: Channel | None = None, engine: Engine | None = None, silence_limit_s: float = 60.0
    ) -> None:
        """Prepare a client; `attach` brings the channel where none is given.

        Without `engine`, the first death is final, as is any death before the first `Ready`.
        """
        self._connection = None if channel is None else self._connect(channel)
        self._engine = engine
        self._silence_limit_s = silence_limit_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = itertools.count(1)
        self._running: dict[int, InflightRequest] = {}
        self._quarantine = Quarantine(self._running)
        self._quarantine.next_requests()  # no suspects: it is over at once
        self._received_at = time.monotonic()
        self._lost_at: float | None = None
        self.target: str | None = None
        self.ready: Ready | None = None
        self.status: Status | None = None
        self.progress = ""
        self.dead: str | None = None
        self.restarts = 0
        self.resumed = 0

    @property
    def active(self) -> int:
        """Number of requests that have not ended."""
        return len(self._running)

    @property
    def silent_s(self) -> float:
        """Seconds since the last message of the engine."""
        return time.monotonic() - self._received_at

    @property
    def lost_s(self) -> float | None:
        """Seconds since the engine was lost; None while there is one."""
        return None if self._lost_at is None else time.monotonic() - self._lost_at

    def start(self) -> None:
        """Begin to read on the running event loop. A second call changes nothing."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._received_at = time.monotonic()
            if self._connection is not None:
                self._connection.start(self._loop)
            self._check_silence(self._loop)

    def attach(self, channel: Channel, engine: Engine) -> None:
        """Use the first engine and its channel from now on. Must be called on the event loop."""
        self._engine = engine
        if self.dead is not None or self._loop is None:
            channel.close()
            return
        self._received_at = time.monotonic()
        self._connection = self._connect(channel)
        self._connection.start(self._loop)

    def stop(self) -> None:
        """Abort running requests, close the channel, and report the end to every submitter."""
        if self._engine is not None:
            self._engine.supervisor.expect_end()
        for number in self._running:
            self._send_or_queue(Abort(request=number))
        self._die("the server is shutting down")

    def next_number(self) -> int:
        """Return an unused request number for a `Submit`."""
        return next(self._numbers)

    def submit(self, requests: Sequence[InflightRequest]) -> None:
        """Send all requests or none; each `deliver` is called on the event loop with the request's reports.

        Between two engines they wait with the requests that will be resumed. Raises `EngineDeadError`,
        `OverloadedError`, or `RequestError` for more tokens than a message may have.
        """
        if any(len(each.submit.prompt) + len(each.submit.output) > MAX_TOKENS for each in requests):
            raise RequestError(f"a prompt and its output have more than {MAX_TOKENS} tokens", "prompt")
        connection = self._connection
        if connection is not None and self.dead is None and self._lost_at is None and connection.closed:
            connection.drain()
        if self.dead is not None or connection is None:
            raise EngineDeadError(self.dead or "no engine has been started")
        if self._quarantine.over and not connection.closed:
            self._send(requests, connection)
        self._running.update({each.number: each for each in requests})

    def _connect(self, channel: Channel) -> AsyncConnection:
        return AsyncConnection(channel, self._on_messages, self._on_lost)

    def _send_or_queue(self, message: Message) -> None:
        if self._connection is not None:
            self._connection.send_or_queue(message)

    def _send(self, requests: Sequence[InflightRequest], connection: AsyncConnection) -> None:
        messages = group_choices(each.submit for each in requests)
        if self._lost_at is not None:
            for message in messages:
                connection.send_or_queue(message)
        elif not connection.send_all(messages):
            raise OverloadedError("the engine does not take requests fast enough", retry_after_s=1.0)
        for each in requests:
            each.sent = not connection.closed

    def abort(self, number: int) -> None:
        """Free a request after its client is gone. Does nothing when it has already ended."""
        if self._running.pop(number, None) is not None:
            self._send_or_queue(Abort(request=number))

    def finish(self, number: int) -> None:
        """End a request at its stop string. `Finished` follows, or an error where the engine died."""
        request = self._running.get(number)
        if request is None:
            return
        request.finishing = True
        if self._lost_at is None:
            self._send_or_queue(Finish(request=number))
        else:
            self._send_or_queue(Abort(request=number))  # the next engine may already have it
            self._end(number, EngineDeadError("the request's statistics were lost with the engine"))

    def _on_messages(self, messages: Sequence[Message]) -> None:
        self._received_at = time.monotonic()
        for message in messages:
            self._dispatch(message)
        self._send_admitted()

    def _check_silence(self, loop: asyncio.AbstractEventLoop) -> None:
        # The event loop reads first, so that a stopped and continued process does not look like silence.
        works = self.ready is not None and self._lost_at is None
        if works and self._engine is not None and self.silent_s > self._silence_limit_s:
            self._engine.supervisor.suspect_verifier(self.silent_s)
        if self.dead is None:
            loop.call_later(_CHECK_INTERVAL_S, self._check_silence, loop)

    def _dispatch(self, message: Message) -> None:
        if isinstance(message, Committed):
            request = self._running.get(message.request)
            if request is not None:
                request.receive(message)
        elif isinstance(message, Finished | Refused):
            self._end(message.request, message)
        elif isinstance(message, Status):
            self.status = message
        elif isinstance(message, Ready):
            self._on_engine_ready(message)
        elif isinstance(message, Progress):
            self.progress = message.text
        else:
            logger.warning("unexpected %s from the engine", type(message).__name__)

    def _end(self, number: int, report: Finished | Refused | EngineDeadError) -> None:
        request = self._running.pop(number, None)
        if request is not None:
            request.deliver(report)

    def _on_engine_ready(self, ready: Ready) -> None:
        if ready.protocol != PROTOCOL_VERSION:
            self._die(
                f"protocol versions differ (server {PROTOCOL_VERSION}, verifier {ready.protocol}): "
                "install the same version of ssd-serve on both sides"
            )
            return
        self.ready = ready
        if self._engine is not None:
            self._engine.supervisor.target_is_ready()
        lost_s = self.lost_s
        if lost_s is not None:
            resumed = sum(request.interrupted for request in self._running.values())
            logger.warning("engine restarted after %.1f s; resumed requests: %d", lost_s, resumed)
            self._lost_at = None
            self.restarts += 1
            self.resumed += resumed

    def _on_lost(self, reason: str) -> None:
        """Interrupt running requests, and wait for the next engine if one may come."""
        if self._engine is None or self._loop is None or self.ready is None:
            self._die(reason)
            return
        if self._lost_at is None:
            logger.warning("%s; requests that wait for the next one: %d", reason, self.active)
            self._lost_at = time.monotonic()
            self.status = None  # its gauges are out of date
            interrupt_all(self._running)
            for number, request in list(self._running.items()):
                self._interrupt(number, request, self._engine)
        self._start_reconnect(self._engine, self._loop)

    def _interrupt(self, number: int, request: InflightRequest, engine: Engine) -> None:
        if request.finishing:
            self._end(number, EngineDeadError("the request's statistics were lost with the engine"))
        elif request.is_poison:
            reason = f"{request.crash_count} engines in a row died while they worked on this request"
            logger.error("request %d is aborted: %s", number, reason)
            self._end(number, EngineDeadError(reason))
            engine.supervisor.deaths_are_explained()
        else:
            request.deliver(Interrupted())

    def _start_reconnect(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        if self.dead is not None:
            return
        # A thread of its own: at shutdown the loop would wait for a thread of its pool.
        thread = threading.Thread(
            target=self._await_engine, args=(engine, loop), name="reconnect", daemon=True
        )
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            logger.warning("no thread to reconnect yet: %s", error)
            loop.call_later(_CHECK_INTERVAL_S, self._start_reconnect, engine, loop)

    def _await_engine(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        """Runs on the reconnect thread."""
        found: Channel | EngineDeadError
        try:
            found = engine.connect(math.inf)
        except EngineDeadError as error:
            found = error
        except (OSError, MemoryError) as error:  # shortages pass
            logger.warning("the next engine cannot be reached yet: %s", in_a_line(error))
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(
                    loop.call_later, _CHECK_INTERVAL_S, self._start_reconnect, engine, loop
                )
            return
        except Exception as error:  # requests must not wait forever
            logger.exception("the next engine cannot be reached")
            found = EngineDeadError(f"the next engine cannot be reached: {in_a_line(error)}")
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._use_next_engine, found)

    def _use_next_engine(self, found: Channel | EngineDeadError) -> None:
        if isinstance(found, EngineDeadError):
            self._die(str(found))
            return
        if self.dead is not None or self._loop is None:
            found.close()
            return
        self._connection = self._connect(found)
        for request in self._running.values():
            request.sent = False  # an engine may also have died before it read anything
        self._quarantine = Quarantine(self._running)
        self._send_admitted()
        self._connection.start(self._loop)

    def _send_admitted(self) -> None:
        admitted = self._quarantine.next_requests()
        for message in group_choices(request.resubmission() for request in admitted):
            self._send_or_queue(message)
        for request in admitted:
            request.sent = True

    def _die(self, reason: str) -> None:
        if self.dead is not None:
            return
        self.dead = reason
        if self._connection is not None:
            self._connection.close()
        running, self._running = self._running, {}
        for request in running.values():
            request.deliver(EngineDeadError(reason))
