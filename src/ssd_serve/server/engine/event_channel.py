"""A channel on an event loop: what arrives is handed on at once, and what must arrive is sent, however late.

Knows no requests, and nothing of what comes after its end.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ssd_serve.base.draft_messages import Message
from ssd_serve.base.errors import ProtocolError

RETRY_SEND_S = 0.01


class MessageChannel(Protocol):
    """What a line needs of a channel; none of it blocks."""

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

    def post(self, message: Message) -> bool:
        """The same, but `flush` sends it."""
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


class NoChannel:
    """In place of a channel until there is one: says nothing, takes nothing, and has not ended."""

    closed = False
    pending = 0

    def send(self, message: Message) -> bool:
        """There is nobody to take it."""
        del message
        return False

    def post(self, message: Message) -> bool:
        """There is nobody to take it."""
        return self.send(message)

    def flush(self) -> bool:
        """Nothing is pending."""
        return True

    def receive(self) -> list[Message]:
        """Nobody speaks."""
        return []

    def fileno(self) -> int:
        """There is nothing to wait on."""
        return -1

    def close(self) -> None:
        """Nothing is open."""


class EngineLine:
    """One channel, from `start` on the event loop to `close`. `ended` is called once with the reason when the
    peer is gone, after everything that it had said; not after `close`."""

    def __init__(
        self,
        channel: MessageChannel,
        heard: Callable[[Sequence[Message]], None],
        ended: Callable[[str], None],
    ) -> None:
        self._channel = channel
        self._heard = heard
        self._ended = ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._descriptor = -1
        self._unsent: deque[Message] = deque()
        self._retry: asyncio.TimerHandle | None = None
        self._soon = False
        self._flushing = False
        self._over = False

    @property
    def closed(self) -> bool:
        """Nothing can be sent any more."""
        return self._over or self._channel.closed

    @property
    def waiting(self) -> int:
        """Messages that the channel has not taken yet."""
        return len(self._unsent)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to listen, and send what waits."""
        self._loop = loop
        self._descriptor = self._channel.fileno()
        if self._descriptor >= 0:
            loop.add_reader(self._descriptor, self.drain)
        if self._channel.pending:
            self._flush_when_writable()
        self._send_unsent()
        self.drain()

    def send(self, message: Message) -> bool:
        """Send now, behind everything that waits. False: there is no room, or the peer is gone."""
        return not self._unsent and self._send(message)

    def send_surely(self, message: Message) -> None:
        """Send now, or keep it until there is room; in order."""
        self._unsent.append(message)
        self._send_unsent()

    def send_all(self, messages: Iterable[Message]) -> bool:
        """All of them or none: what is begun is sent whole, since who is told to try again would come with as
        much. False: there is no room."""
        for index, message in enumerate(messages):
            if index:
                self.send_surely(message)
            elif not self.send(message) and not self.closed:
                return False
        return True

    def send_soon(self, message: Message) -> None:
        """The same, with all that is said in this turn of the loop in one go."""
        self._unsent.append(message)
        if not self._soon and self._loop is not None:
            self._soon = True
            self._loop.call_soon(self._send_unsent)

    def drain(self) -> None:
        """Hand on everything that waits; notice the end."""
        if self._over:
            return
        try:
            messages = self._channel.receive()
        except ProtocolError as error:
            self._end(f"the engine sent something that is not the protocol: {error}")
            return
        if messages:
            self._heard(messages)
        if self._channel.closed:
            self._end("the engine process ended")

    def close(self) -> None:
        """Let go of the channel; nobody is told."""
        self._over = True
        self._stop_flushing()
        self._stop_retrying()
        if self._loop is not None and self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
        self._channel.close()

    def _end(self, reason: str) -> None:
        if not self._over:
            self.close()
            self._ended(reason)

    def _send(self, message: Message) -> bool:
        taken = not self._over and self._channel.send(message)
        if taken and self._channel.pending:
            self._flush_when_writable()
        return taken

    def _send_unsent(self) -> None:
        self._stop_retrying()
        self._soon = False
        while self._unsent and not self._over and self._channel.post(self._unsent[0]):
            self._unsent.popleft()
        if not self._over and not self._channel.flush():
            self._flush_when_writable()
        if self._unsent and not self.closed and self._loop is not None:
            self._retry = self._loop.call_later(RETRY_SEND_S, self._send_unsent)

    def _stop_retrying(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _flush_when_writable(self) -> None:
        if self._flushing or self._loop is None or self._descriptor < 0:
            return
        self._flushing = True
        self._loop.add_writer(self._descriptor, self._flush)

    def _flush(self) -> None:
        if self._channel.flush():
            self._stop_flushing()
        if self._channel.closed:
            self.drain()

    def _stop_flushing(self) -> None:
        if self._flushing and self._loop is not None:
            self._flushing = False
            self._loop.remove_writer(self._descriptor)
