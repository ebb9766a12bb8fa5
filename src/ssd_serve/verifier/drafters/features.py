"""Sends a drafter the target's features of committed tokens: rows by position, as fast as it reads them.

A drafter on this machine reads them from shared memory, others receive messages. Rows that do not fit wait,
so that outcomes, which are small, never wait for them. Knows a channel and rows, but not when to send them.
"""

from msgspec.structs import replace

from ssd_serve.base.draft_messages import Features, SharedMemory
from ssd_serve.base.logs import Logger
from ssd_serve.transport.channel import Channel, SocketChannel
from ssd_serve.transport.shared_memory import SharedSpan, SharedWriter
from ssd_serve.verifier.request import Request, TokenFeatures

_MESSAGE_BYTES, _MESSAGES = 1 << 20, 32
"""Size of a message of rows, and most messages of one request at once."""
_MAX_UNSENT_BYTES = 2 << 20
"""Most bytes of rows in a channel's queue: half of the queue."""
_SHARED_BYTES = 64 << 20
"""Size of the shared memory, of which only written pages take memory. A round of 32 requests with 4 tokens each
of a large target, with rows of 48 KiB, writes 6 MiB."""


class FeatureSender:
    """Sends rows of the `layers` that the drafter reads, through at most `shared_bytes` of shared memory."""

    def __init__(self, channel: Channel, shared_bytes: int = _SHARED_BYTES) -> None:
        self._shared_bytes = shared_bytes
        self._message_bytes = min(_MESSAGE_BYTES, shared_bytes // 8)
        self.layers: tuple[int, ...] = ()
        self.behind = False
        """Rows did not fit and were not sent since."""
        self._channel = channel
        self._unsent = 0
        """Bytes of rows that may still be in the channel's queue."""
        self._offered: SharedWriter | None = None
        self._shared: SharedWriter | None = None
        """The offered memory, once the drafter has confirmed that it reads it."""

    @property
    def has_room(self) -> bool:
        if self._shared is not None:
            return self._shared.ring.find(self._message_bytes) is not None
        if self._channel.flush():
            self._unsent = 0
        return not self._unsent

    def begin(self, layers: tuple[int, ...], log: Logger) -> None:
        """Start sending these layers; offers shared memory to a drafter on this machine."""
        self.layers = layers
        if not layers or not isinstance(self._channel, SocketChannel) or self._channel.peer:
            return
        try:
            offered = SharedWriter(self._shared_bytes)
        except OSError as error:
            log.warning("no shared memory: features are sent through the socket", reason=str(error))
            return
        if self._channel.send_with(SharedMemory(self._shared_bytes), offered.descriptor):
            self._offered = offered
        offered.close()  # our copy of the descriptor: the mapping stays

    def on_read(self, total: int) -> None:
        """Free the first `total` spans, which the drafter has read. Raises `ProtocolError` if impossible."""
        if self._offered is not None:
            self._offered.ring.give_back(total)
            self._shared = self._offered

    def send(self, request: Request, start: int) -> int:
        """Send a request's rows from position `start` on, without those that were evicted.

        Returns the position behind the last row that was sent.
        """
        table = request.features
        if not self.layers or table is None:
            return start
        start = table.first(start)
        most = max(1, self._message_bytes // max(1, 2 * table.width(self.layers)))
        for _ in range(_MESSAGES):
            count = min(most, table.end - start)
            if count <= 0:
                return start
            if not self._send_rows(request, table, start, count):
                break
            start += count
        self.behind = self.behind or start < table.end
        return start

    def _send_rows(self, request: Request, table: TokenFeatures, start: int, count: int) -> bool:
        width = table.width(self.layers)
        length = 2 * width * count
        message = Features(request.number, request.epoch, start, width, b"")
        if self._shared is not None:
            return self._share(self._shared, message, table, count)
        if self._unsent + length > _MAX_UNSENT_BYTES and not self.has_room:
            return False
        self._unsent += length
        return self._channel.post(replace(message, data=table.rows(start, count, self.layers)))

    def _share(self, memory: SharedWriter, message: Features, table: TokenFeatures, count: int) -> bool:
        length = 2 * message.width * count
        offset = memory.ring.find(length)
        if offset is None:
            return False
        place = SharedSpan(offset, length)
        table.write(message.position, count, self.layers, memory.at(place))
        if not self._channel.post(replace(message, shared=place)):
            return False
        memory.ring.take(place)
        return True
