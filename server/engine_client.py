"""The server's end of the conversation with the verifier process.

Sends Submit, Abort and Finish; hands reports on to whoever submitted. Lives on one event loop and never
blocks it. Knows nothing about HTTP or text, and nothing about how the engine works.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ssd_serve.errors import EngineDeadError, OverloadedError, ProtocolError
from ssd_serve.messages import (
    PROTOCOL_VERSION,
    Abort,
    Committed,
    Finish,
    Finished,
    Message,
    Progress,
    Ready,
    Refused,
    SamplingParameters,
    Status,
    Submit,
)

logger = logging.getLogger(__name__)

RETRY_SEND_S = 0.01


class MessageChannel(Protocol):
    """What the client needs of a channel; none of it blocks."""

    @property
    def closed(self) -> bool:
        """The peer is gone."""
        ...

    @property
    def pending(self) -> int:
        """Bytes that the kernel has not taken yet."""
        ...

    def send(self, message: Message) -> bool:
        """False: not taken, the queue is full or the channel closed."""
        ...

    def flush(self) -> bool:
        """Send what can be sent; True when nothing is pending."""
        ...

    def receive(self) -> list[Message]:
        """All waiting messages, in order."""
        ...

    def fileno(self) -> int:
        """Descriptor to wait on for reading."""
        ...

    def close(self) -> None:
        """Close now."""
        ...


Report = Committed | Finished | Refused | EngineDeadError
"""What a submitter is told about its request. After anything but Committed nothing more follows."""

Deliver = Callable[[Report], None]


class EngineClient:
    """One per server and channel. `start` on the event loop, then `submit`; `stop` closes the channel.

    `ready`, `status` and `progress` hold the latest of each; `dead` is the reason once the engine is gone.
    """

    def __init__(self, channel: MessageChannel) -> None:
        self._channel = channel
        self._loop: asyncio.AbstractEventLoop | None = None
        self._descriptor = -1
        self._numbers = itertools.count(1)
        self._submitters: dict[int, Deliver] = {}
        self._unsent: deque[Abort | Finish] = deque()
        self._retry: asyncio.TimerHandle | None = None
        self._flushing = False
        self._heard_at = time.monotonic()
        self.ready: Ready | None = None
        self.status: Status | None = None
        self.progress = ""
        self.dead: str | None = None

    @property
    def active(self) -> int:
        """Requests that have not ended."""
        return len(self._submitters)

    @property
    def silent_s(self) -> float:
        """Seconds since the engine last said anything."""
        return time.monotonic() - self._heard_at

    def start(self) -> None:
        """Begin to listen on the running event loop. A second call changes nothing."""
        if self._loop is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._heard_at = time.monotonic()
        self._descriptor = self._channel.fileno()
        if self._descriptor >= 0:
            self._loop.add_reader(self._descriptor, self._drain)
        self._drain()

    def stop(self) -> None:
        """Abort what runs, close the channel, and tell every submitter. The engine takes it as the end."""
        for request in self._submitters:
            self._send_surely(Abort(request=request))
        self._die("the server is shutting down")

    def submit(
        self, prompt: tuple[int, ...], parameters: SamplingParameters, seed: int, deliver: Deliver
    ) -> int:
        """Send a request and return its number; `deliver` is called on the event loop with each report."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        request = next(self._numbers)
        message = Submit(request=request, prompt=prompt, parameters=parameters, seed=seed)
        if not self._send(message):
            if self._channel.closed:
                self._die("the engine process ended")
                raise EngineDeadError(self.dead or "")
            raise OverloadedError("the engine does not take requests fast enough", retry_after_s=1.0)
        self._submitters[request] = deliver
        return request

    def abort(self, request: int) -> None:
        """The client is gone: free the request. Does nothing when it has already ended."""
        if self._submitters.pop(request, None) is not None:
            self._send_surely(Abort(request=request))

    def finish(self, request: int) -> None:
        """A stop string was found: end the request; its `Finished` follows. Nothing when it has ended."""
        if request in self._submitters:
            self._send_surely(Finish(request=request))

    def _send(self, message: Message) -> bool:
        if self._unsent and not isinstance(message, Abort | Finish):
            return False
        taken = self._channel.send(message)
        if taken and self._channel.pending:
            self._flush_when_writable()
        return taken

    def _send_surely(self, message: Abort | Finish) -> None:
        """Send now, or keep it until the queue has room: a lost Abort would hold its slots for ever."""
        if self.dead is None:
            self._unsent.append(message)
            self._send_unsent()

    def _send_unsent(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        while self._unsent and self._send(self._unsent[0]):
            self._unsent.popleft()
        if self._unsent and not self._channel.closed and self._loop is not None:
            self._retry = self._loop.call_later(RETRY_SEND_S, self._send_unsent)

    def _flush_when_writable(self) -> None:
        if self._flushing or self._loop is None or self._descriptor < 0:
            return
        self._flushing = True
        self._loop.add_writer(self._descriptor, self._flush)

    def _flush(self) -> None:
        if self._channel.flush():
            self._stop_flushing()
        if self._channel.closed:
            self._drain()

    def _stop_flushing(self) -> None:
        if self._flushing and self._loop is not None:
            self._flushing = False
            self._loop.remove_writer(self._descriptor)

    def _drain(self) -> None:
        """Dispatch everything that waits; notice the end."""
        try:
            messages = self._channel.receive()
        except ProtocolError as error:
            self._die(f"the engine sent something that is not the protocol: {error}")
            return
        for message in messages:
            self._dispatch(message)
        if messages:
            self._heard_at = time.monotonic()
        if self._channel.closed and self.dead is None:
            self._die("the engine process ended")

    def _dispatch(self, message: Message) -> None:
        if isinstance(message, Committed):
            deliver = self._submitters.get(message.request)
            if deliver is not None:
                deliver(message)
        elif isinstance(message, Finished | Refused):
            deliver = self._submitters.pop(message.request, None)
            if deliver is not None:
                deliver(message)
        elif isinstance(message, Status):
            self.status = message
        elif isinstance(message, Ready):
            self._greet(message)
        elif isinstance(message, Progress):
            self.progress = message.text
        else:
            logger.warning("unexpected %s from the engine", type(message).__name__)

    def _greet(self, ready: Ready) -> None:
        """Nothing has been submitted yet: a verifier of another version is not talked to."""
        if ready.protocol == PROTOCOL_VERSION:
            self.ready = ready
            return
        self._die(
            f"protocol versions differ (server {PROTOCOL_VERSION}, verifier {ready.protocol}): "
            "install the same version of ssd-serve on both sides"
        )

    def _die(self, reason: str) -> None:
        if self.dead is not None:
            return
        self.dead = reason
        self._stop_flushing()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._loop is not None and self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
        self._channel.close()
        submitters, self._submitters = self._submitters, {}
        for deliver in submitters.values():
            deliver(EngineDeadError(reason))
