"""A message channel on an event loop: hands on what arrives, and keeps what must arrive until it is sent.

Knows no requests, and nothing of what happens after its end.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ssd_serve.base.draft_messages import Message
from ssd_serve.base.errors import ProtocolError
from ssd_serve.transport.channel import Channel

RETRY_SEND_S = 0.01


class AsyncConnection:
    """A channel, from `start` on the event loop to `close`.

    `on_messages` gets what arrives. `on_end` is called once with the reason when the peer is gone, after all
    messages; never after `close`.
    """

    def __init__(
        self,
        channel: Channel,
        on_messages: Callable[[Sequence[Message]], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._channel = channel
        self._on_messages = on_messages
        self._on_end = on_end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._descriptor = -1
        self._unsent: deque[Message] = deque()
        self._retry: asyncio.TimerHandle | None = None
        self._flushing = False
        self._over = False

    @property
    def closed(self) -> bool:
        """True when nothing can be sent any more."""
        return self._over or self._channel.closed

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to read, and send what is queued."""
        self._loop = loop
        self._descriptor = self._channel.fileno()
        if self._descriptor >= 0:
            loop.add_reader(self._descriptor, self.drain)
        if self._channel.pending:
            self._flush_when_writable()
        self._send_unsent()
        self.drain()

    def send_or_queue(self, message: Message) -> None:
        """Send now, or queue the message; the order stays."""
        self._unsent.append(message)
        self._send_unsent()

    def send_all(self, messages: Iterable[Message]) -> bool:
        """Send all messages or none; False: the queue is full for the first.

        The rest is queued: a client that retries would come back with as much.
        """
        for index, message in enumerate(messages):
            if index:
                self.send_or_queue(message)
            elif (self._unsent or not self._send(message)) and not self.closed:
                return False
        return True

    def drain(self) -> None:
        """Hand on everything that has arrived; notice the end."""
        if self._over:
            return
        try:
            messages = self._channel.receive()
        except ProtocolError as error:
            self._end(f"the engine sent a malformed message: {error}")
            return
        if messages:
            self._on_messages(messages)
        if self._channel.closed:
            self._end("the engine process ended")

    def close(self) -> None:
        """Close the channel without a call of `on_end`."""
        self._over = True
        self._stop_flushing()
        self._stop_retrying()
        if self._loop is not None and self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
        self._channel.close()

    def _end(self, reason: str) -> None:
        if not self._over:
            self.close()
            self._on_end(reason)

    def _send(self, message: Message) -> bool:
        taken = not self._over and self._channel.send(message)
        if taken and self._channel.pending:
            self._flush_when_writable()
        return taken

    def _send_unsent(self) -> None:
        self._stop_retrying()
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
