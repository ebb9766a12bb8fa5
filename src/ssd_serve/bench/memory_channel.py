"""A pair of channels inside one process: deterministic, and with scripted faults, for tests.

Messages pass through the real encoding, so the two ends share no objects. Time is counted in `receive` and
`wait` calls of the receiving end. Knows no threads, clocks or sockets.
"""

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ssd_serve.base.draft_messages import Message
from ssd_serve.transport.framing import FrameReader, FrameWriter

Schedule = Callable[[int, Message], tuple[int, ...]]
"""What happens to the n-th message of a direction: the number of ticks after which each copy arrives.

`()` drops it, `(0,)` delivers it at the next receive, `(3,)` is late (and so may be overtaken), `(0, 5)` is
delivered twice.
"""


def faultless(_index: int, _message: Message) -> tuple[int, ...]:
    """Every message arrives once, in order, at once."""
    return (0,)


def scripted(fates: Mapping[int, tuple[int, ...]]) -> Schedule:
    """Faults for the named messages (counted from 0), everything else arrives at once."""
    return lambda index, _message: fates.get(index, (0,))


@dataclass(frozen=True, slots=True)
class FaultRates:
    """How often each fault happens; delays are drawn from 1 to `max_ticks`."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    max_ticks: int = 8
    spare: tuple[type[Message], ...] = ()
    """Messages of these types always arrive at once."""


def seeded(seed: int, rates: FaultRates) -> Schedule:
    """Random faults that are the same for the same seed. Delays reorder."""
    source = random.Random(seed)

    def fate(_index: int, message: Message) -> tuple[int, ...]:
        if isinstance(message, rates.spare):
            return (0,)
        if source.random() < rates.drop:
            return ()
        copies = 2 if source.random() < rates.duplicate else 1
        return tuple(
            source.randint(1, rates.max_ticks) if source.random() < rates.delay else 0 for _ in range(copies)
        )

    return fate


class _Direction:
    """One way of the pair: what is under way, and the receiving end's clock."""

    def __init__(self, schedule: Schedule, capacity: int) -> None:
        self._schedule = schedule
        self._capacity = capacity
        self._under_way: list[tuple[int, int, bytes]] = []
        self._sent = 0
        self._order = 0
        self._writer = FrameWriter()
        self._reader = FrameReader()
        self.now = 0
        self.ended = False

    def send(self, message: Message) -> bool:
        if self.ended or len(self._under_way) >= self._capacity:
            return False
        frame = bytes(self._writer.encode(message))
        for ticks in self._schedule(self._sent, message):
            heapq.heappush(self._under_way, (self.now + ticks, self._order, frame))
            self._order += 1
        self._sent += 1
        return True

    def send_raw(self, frame: bytes) -> None:
        heapq.heappush(self._under_way, (self.now, self._order, frame))
        self._order += 1

    @property
    def ready(self) -> bool:
        return self._reader.ready or bool(self._under_way and self._under_way[0][0] <= self.now)

    def take(self) -> list[Message]:
        while self._under_way and self._under_way[0][0] <= self.now:
            self._reader.feed(heapq.heappop(self._under_way)[2])
        self.now += 1
        return self._reader.take()


class MemoryChannel:
    """One end of an in-process pair; the same interface as `Channel`."""

    def __init__(self, outgoing: _Direction, incoming: _Direction) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self.on_wait: Callable[[], object] | None = None
        """Called by `wait` when nothing has arrived: a test lets the other side work here."""

    @property
    def closed(self) -> bool:
        """Either end called `close`. What had arrived before can still be received."""
        return self._incoming.ended

    @property
    def pending(self) -> int:
        """Always 0: there is no kernel between the ends."""
        return 0

    def send(self, message: Message) -> bool:
        """Hand the message to the schedule. False when too many are under way, or the channel is closed."""
        return self._outgoing.send(message)

    def post(self, message: Message) -> bool:
        """The same: nothing is gained by sending together."""
        return self.send(message)

    def send_raw(self, frame: bytes) -> None:
        """Put raw bytes on the wire, to test what a peer does with nonsense."""
        self._outgoing.send_raw(frame)

    def flush(self) -> bool:
        """Nothing to do."""
        return True

    def receive(self) -> list[Message]:
        """Every message that has arrived; one tick passes."""
        try:
            return self._incoming.take()
        except Exception:
            self.close()
            raise

    def wait(self, timeout_s: float) -> bool:
        """Whether something has arrived, after letting the other side work. No real time passes."""
        if not self._incoming.ready and not self.closed and timeout_s > 0:
            self._incoming.now += 1
            if self.on_wait is not None:
                self.on_wait()
        return self._incoming.ready or self.closed

    def fileno(self) -> int:
        """There is no descriptor."""
        return -1

    def close(self) -> None:
        """End both directions."""
        self._outgoing.ended = True
        self._incoming.ended = True


def memory_pair(
    first_to_second: Schedule = faultless, second_to_first: Schedule = faultless, *, capacity: int = 4096
) -> tuple[MemoryChannel, MemoryChannel]:
    """Two connected ends. `capacity` is how many messages may be under way in one direction."""
    there, back = _Direction(first_to_second, capacity), _Direction(second_to_first, capacity)
    return MemoryChannel(there, back), MemoryChannel(back, there)
