"""A deterministic pair of channels inside one process, with a schedule of arrivals.

Messages pass through the real encoding, so the two ends share no objects. Time is counted in `receive` and
`wait` calls of the receiving end.
"""

import heapq
from collections.abc import Callable

from ssd_serve.base.draft_messages import Message
from ssd_serve.transport.framing import FrameReader, FrameWriter

Schedule = Callable[[int, Message], tuple[int, ...]]
"""Ticks after which each copy of the n-th message of a direction arrives.

`()` drops it, `(0,)` delivers it at the next receive, `(3,)` delays it, `(0, 5)` delivers it twice.
"""


def faultless(_index: int, _message: Message) -> tuple[int, ...]:
    """Deliver every message once, in order, without delay."""
    return (0,)


class _Direction:
    """Messages in one direction, and the receiving end's clock."""

    def __init__(self, schedule: Schedule, capacity: int) -> None:
        self._schedule = schedule
        self._capacity = capacity
        self._in_flight: list[tuple[int, int, bytes]] = []
        self._sent = 0
        self._order = 0
        self._writer = FrameWriter()
        self._reader = FrameReader()
        self.now = 0
        self.ended = False

    def send(self, message: Message) -> bool:
        if self.ended or len(self._in_flight) >= self._capacity:
            return False
        frame = bytes(self._writer.encode(message))
        for ticks in self._schedule(self._sent, message):
            heapq.heappush(self._in_flight, (self.now + ticks, self._order, frame))
            self._order += 1
        self._sent += 1
        return True

    def send_raw(self, frame: bytes) -> None:
        heapq.heappush(self._in_flight, (self.now, self._order, frame))
        self._order += 1

    @property
    def ready(self) -> bool:
        return self._reader.ready or bool(self._in_flight and self._in_flight[0][0] <= self.now)

    def take(self) -> list[Message]:
        while self._in_flight and self._in_flight[0][0] <= self.now:
            self._reader.feed(heapq.heappop(self._in_flight)[2])
        self.now += 1
        return self._reader.take()


class MemoryChannel:
    """An end of an in-process pair, with the interface of `Channel`."""

    def __init__(self, outgoing: _Direction, incoming: _Direction) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self.on_wait: Callable[[], object] | None = None
        """Callback of `wait` when nothing has arrived: it lets the other side work."""

    @property
    def closed(self) -> bool:
        """True after either end called `close`; messages that had arrived can still be received."""
        return self._incoming.ended

    @property
    def pending(self) -> int:
        """Number of buffered bytes, always 0."""
        return 0

    def send(self, message: Message) -> bool:
        """Send a message; return False if too many are in flight, or the channel is closed."""
        return self._outgoing.send(message)

    def post(self, message: Message) -> bool:
        """Send a message, as `send` does."""
        return self.send(message)

    def send_raw(self, frame: bytes) -> None:
        """Send raw bytes, to test the reaction to garbage."""
        self._outgoing.send_raw(frame)

    def flush(self) -> bool:
        """Return True: nothing is buffered."""
        return True

    def receive(self) -> list[Message]:
        """Return every message that has arrived; one tick passes."""
        try:
            return self._incoming.take()
        except Exception:
            self.close()
            raise

    def wait(self, timeout_s: float) -> bool:
        """Let the other side work, and return True if something has arrived. No real time passes."""
        if not self._incoming.ready and not self.closed and timeout_s > 0:
            self._incoming.now += 1
            if self.on_wait is not None:
                self.on_wait()
        return self._incoming.ready or self.closed

    def fileno(self) -> int:
        """Return -1: there is no descriptor."""
        return -1

    def close(self) -> None:
        """Close both directions."""
        self._outgoing.ended = True
        self._incoming.ended = True


def memory_pair(
    first_to_second: Schedule = faultless, second_to_first: Schedule = faultless, *, capacity: int = 4096
) -> tuple[MemoryChannel, MemoryChannel]:
    """Return two connected ends; `capacity` limits the messages in flight in one direction."""
    there, back = _Direction(first_to_second, capacity), _Direction(second_to_first, capacity)
    return MemoryChannel(there, back), MemoryChannel(back, there)
