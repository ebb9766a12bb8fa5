"""The server's end of the conversation with the verifier process.

Sends Submit, Abort and Finish; hands reports on to whoever submitted. When the verifier dies, what runs is
submitted again to the one that comes after it, and goes on where it was. Lives on one event loop and never
blocks it. Knows nothing about HTTP or text, and nothing about how the engine works.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ssd_serve.base.draft_messages import PROTOCOL_VERSION, Message
from ssd_serve.base.errors import EngineDeadError, OverloadedError, in_a_line
from ssd_serve.base.messages import (
    Abort,
    Committed,
    Finish,
    Finished,
    Progress,
    Ready,
    Refused,
    RequestOptions,
    SamplingParameters,
    Status,
)
from ssd_serve.server.engine.event_channel import EngineLine, MessageChannel, NoChannel
from ssd_serve.server.engine.quarantine import Quarantine, interrupt_all
from ssd_serve.server.engine.submitted import (
    Deliver,
    Interrupted,
    Submitted,
    Wanted,
    submissions,
    together,
)

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0

Reconnect = Callable[[], MessageChannel]
"""Waits, on a thread, for the channel of the next engine; raises `EngineDeadError` where none will come."""


class EngineClient:
    """One per server. `start` on the event loop, then `submit`; `stop` closes the channel.

    `target` is the model as the engine was told it, with its commit, where somebody knows; `ready`, `status`
    and `progress` hold the latest of each; `dead` is the reason once the engine is gone for good. `restarts`
    and `resumed` count engines that came after another one, and requests that went on there.
    """

    def __init__(
        self,
        channel: MessageChannel | None = None,
        reconnect: Reconnect | None = None,
        on_ready: Callable[[], None] = lambda: None,
        on_silence: Callable[[float], None] = lambda _silent_s: None,
        on_explained: Callable[[], None] = lambda: None,
        longest_silence_s: float = 60.0,
    ) -> None:
        """Without a `channel`, `meet` brings it. Without `reconnect` the first death is for good, as it is
        before the engine was ever ready. `on_ready` is called whenever an engine can generate, `on_silence`
        every second while one that could has said nothing for longer than it may, with the seconds,
        `on_explained` when a request was found of which engines died."""
        self._line = EngineLine(channel or NoChannel(), self._hear, self._lose)
        self._reconnect = reconnect
        self._on_ready = on_ready
        self._on_silence = on_silence
        self._on_explained = on_explained
        self._longest_silence_s = longest_silence_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = itertools.count(1)
        self._running: dict[int, Submitted] = {}
        self._trial = Quarantine(self._running)
        self._trial.admitted()  # nobody is suspect
        self._heard_at = time.monotonic()
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
        """Requests that have not ended."""
        return len(self._running)

    @property
    def silent_s(self) -> float:
        """Seconds since the engine last said anything."""
        return time.monotonic() - self._heard_at

    @property
    def lost_s(self) -> float | None:
        """Seconds since the engine was lost whose successor is not ready yet; None where there is one."""
        return None if self._lost_at is None else time.monotonic() - self._lost_at

    def start(self) -> None:
        """Begin to listen on the running event loop. A second call changes nothing."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._heard_at = time.monotonic()
            self._line.start(self._loop)
            self._listen_for_silence(self._loop)

    def meet(self, channel: MessageChannel) -> None:
        """The first engine has been started: from now on it is listened to. On the event loop."""
        if self.dead is not None or self._loop is None:
            channel.close()
            return
        self._line.close()
        self._heard_at = time.monotonic()
        self._line = EngineLine(channel, self._hear, self._lose)
        self._line.start(self._loop)

    def stop(self) -> None:
        """Abort what runs, close the channel, and tell every submitter. The engine takes it as the end."""
        for request in self._running:
            self._line.send_surely(Abort(request=request))
        self._die("the server is shutting down")

    def submit(
        self,
        prompt: tuple[int, ...],
        parameters: SamplingParameters,
        seed: int,
        deliver: Deliver,
        output: tuple[int, ...] = (),
        options: RequestOptions = RequestOptions(),
    ) -> int:
        """`submit_all` of one request."""
        return self.submit_all([Wanted(prompt, parameters, seed, deliver, output)], options)[0]

    def submit_all(
        self, wanted: Sequence[Wanted], options: RequestOptions = RequestOptions()
    ) -> list[int]:
        """Send requests, all or none of them, and return their numbers; `deliver` is called on the event loop
        with each report.

        While another engine is awaited, they wait with those that will go on there.
        """
        made = submissions(wanted, options, self._numbers)
        self.take(made)
        return [each.first.request for each in made]

    def take(self, made: Sequence[Submitted]) -> None:
        """Send requests that have numbers, all or none of them."""
        if self.dead is None and self._lost_at is None and self._line.closed:
            self._line.drain()
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        if self._trial.over and not self._line.closed:
            self._send(made)
        self._running.update({each.first.request: each for each in made})

    def _send(self, made: Sequence[Submitted]) -> None:
        messages = together(each.first for each in made)
        if self._lost_at is not None:
            for message in messages:
                self._line.send_surely(message)
        elif not self._line.send_all(messages):
            raise OverloadedError("the engine does not take requests fast enough", retry_after_s=1.0)
        for each in made:
            each.sent = not self._line.closed

    def abort(self, request: int) -> None:
        """The client is gone: free the request. Does nothing when it has already ended."""
        if self._running.pop(request, None) is not None:
            self._line.send_surely(Abort(request=request))

    def finish(self, request: int) -> None:
        """A stop string was found: end the request; its `Finished` follows, or an error where the engine has
        died. Nothing when it has ended."""
        submitted = self._running.get(request)
        if submitted is None:
            return
        submitted.finishing = True
        if self._lost_at is None:
            self._line.send_surely(Finish(request=request))
        else:
            self._line.send_surely(Abort(request=request))  # the next engine may have been given it already
            self._end(request, EngineDeadError("the figures of the request went with the engine"))

    def _hear(self, messages: Sequence[Message]) -> None:
        self._heard_at = time.monotonic()
        for message in messages:
            self._dispatch(message)
        self._admit()

    def _listen_for_silence(self, loop: asyncio.AbstractEventLoop) -> None:
        """What has arrived is heard first, also after this process was stopped for a while."""
        works = self.ready is not None and self._lost_at is None
        if works and self.silent_s > self._longest_silence_s:
            self._on_silence(self.silent_s)
        if self.dead is None:
            loop.call_later(_LOOK_EVERY_S, self._listen_for_silence, loop)

    def _dispatch(self, message: Message) -> None:
        if isinstance(message, Committed):
            submitted = self._running.get(message.request)
            if submitted is not None:
                submitted.take(message)
                submitted.deliver(message)
        elif isinstance(message, Finished | Refused):
            self._end(message.request, message)
        elif isinstance(message, Status):
            self.status = message
        elif isinstance(message, Ready):
            self._welcome(message)
        elif isinstance(message, Progress):
            self.progress = message.text
        else:
            logger.warning("unexpected %s from the engine", type(message).__name__)

    def _end(self, request: int, report: Finished | Refused | EngineDeadError) -> None:
        submitted = self._running.pop(request, None)
        if submitted is not None:
            submitted.deliver(report)

    def _welcome(self, ready: Ready) -> None:
        """An engine can generate: the first one, or another. One of another version is not talked to."""
        if ready.protocol != PROTOCOL_VERSION:
            self._die(
                f"protocol versions differ (server {PROTOCOL_VERSION}, verifier {ready.protocol}): "
                "install the same version of ssd-serve on both sides"
            )
            return
        self.ready = ready
        self._on_ready()
        lost_s = self.lost_s
        if lost_s is not None:
            resumed = sum(submitted.interrupted for submitted in self._running.values())
            logger.warning("the engine is back after %.1f s; requests that go on: %d", lost_s, resumed)
            self._lost_at = None
            self.restarts += 1
            self.resumed += resumed

    def _lose(self, reason: str) -> None:
        """The engine is gone. What runs waits for the next one, if one may come."""
        if self._reconnect is None or self._loop is None or self.ready is None:
            self._die(reason)
            return
        if self._lost_at is None:
            logger.warning("%s; requests that wait for the next one: %d", reason, self.active)
            self._lost_at = time.monotonic()
            self.status = None  # no gauge tells of what is gone
            interrupt_all(self._running)
            for request, submitted in list(self._running.items()):
                self._interrupt(request, submitted)
        self._seek(self._reconnect, self._loop)

    def _seek(self, reconnect: Reconnect, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for the next engine, as soon as there is a thread to wait on."""
        if self.dead is not None:
            return
        # A thread of its own: the loop's pool would be waited for when the server ends.
        seeker = threading.Thread(
            target=self._await_engine, args=(reconnect, loop), name="reconnect", daemon=True
        )
        try:
            seeker.start()
        except (RuntimeError, MemoryError) as error:
            logger.warning("the next engine is not waited for yet: %s", error)
            loop.call_later(_LOOK_EVERY_S, self._seek, reconnect, loop)

    def _interrupt(self, request: int, submitted: Submitted) -> None:
        if submitted.finishing:
            self._end(request, EngineDeadError("the figures of the request went with the engine"))
        elif submitted.guilty:
            reason = f"{submitted.losses} engines in a row died while they worked on this request"
            logger.error("request %d is given up: %s", request, reason)
            self._end(request, EngineDeadError(reason))
            self._on_explained()
        else:
            submitted.deliver(Interrupted())

    def _await_engine(self, reconnect: Reconnect, loop: asyncio.AbstractEventLoop) -> None:
        """On a thread: get the next channel, or the reason why there is none."""
        found: MessageChannel | EngineDeadError
        try:
            found = reconnect()
        except EngineDeadError as error:
            found = error
        except (OSError, MemoryError) as error:  # what has run out comes back
            logger.warning("the next engine cannot be reached yet: %s", in_a_line(error))
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(loop.call_later, _LOOK_EVERY_S, self._seek, reconnect, loop)
            return
        except Exception as error:  # whatever it is, nobody may wait for ever
            logger.exception("the next engine cannot be reached")
            found = EngineDeadError(f"the next engine cannot be reached: {in_a_line(error)}")
        with suppress(RuntimeError):  # the loop has ended, and with it who waited
            loop.call_soon_threadsafe(self._go_on, found)

    def _go_on(self, found: MessageChannel | EngineDeadError) -> None:
        """Submit everything again, behind the tokens that it has. The engine reads it when it has loaded."""
        if isinstance(found, EngineDeadError):
            self._die(str(found))
            return
        if self.dead is not None or self._loop is None:
            found.close()
            return
        self._line = EngineLine(found, self._hear, self._lose)
        for submitted in self._running.values():
            submitted.sent = False  # also what an engine was given that died before it could read
        self._trial = Quarantine(self._running)
        self._admit()
        self._line.start(self._loop)

    def _admit(self) -> None:
        """Send what the engine may have now."""
        admitted = self._trial.admitted()
        for message in together(submitted.again() for submitted in admitted):
            self._line.send_surely(message)
        for submitted in admitted:
            submitted.sent = True

    def _die(self, reason: str) -> None:
        if self.dead is not None:
            return
        self.dead = reason
        self._line.close()
        running, self._running = self._running, {}
        for submitted in running.values():
            submitted.deliver(EngineDeadError(reason))
