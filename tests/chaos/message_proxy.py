"""A proxy between a verifier and its drafters that drops, delays, duplicates and reorders messages.

It replaces the verifier's socket file, so that neither side needs a setting.
"""

import contextlib
import heapq
import itertools
import os
import threading
import time
from pathlib import Path

from ssd_serve.base.draft_messages import Hello, Message, Refusal
from ssd_serve.base.errors import SsdError
from ssd_serve.bench.memory_channel import Schedule, faultless
from ssd_serve.transport.channel import Channel, Waitable, poll
from ssd_serve.transport.listener import Listener, connect
from tests.message_faults import FaultRates, seeded

TICK_S = 0.01
_POLL_S = 0.005
SPARED = (Hello, Refusal)
"""Messages that always arrive: a handshake is not part of the fault."""


class MessageProxy:
    """Relays the drafters that connect from now on to the verifier that listens at `address`."""

    def __init__(self, address: Path) -> None:
        self._address = address
        self._behind = self._address.with_suffix(".behind")
        self._address.rename(self._behind)
        self._listener = Listener.unix(self._address)
        self._schedule: Schedule = faultless
        self.changed = 0
        """Number of messages that did not arrive exactly once and in time."""
        self.connections = 0
        self._garbage = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="message faults", daemon=True)
        self._thread.start()

    def use(self, rates: FaultRates | None, seed: int = 0) -> None:
        """Apply these faults from now on; None: no faults."""
        self._schedule = faultless if rates is None else seeded(seed, rates)

    def send_garbage(self) -> None:
        """Send bytes to the verifier that are no message, for which it closes the connections."""
        self._garbage = True

    def close(self) -> None:
        """Close the connections; later ones reach the verifier itself. A second call does nothing."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join()
        self._listener.close()
        with contextlib.suppress(OSError):
            self._behind.rename(self._address)

    def _run(self) -> None:
        pairs: list[_Relay] = []
        while not self._stopping.is_set():
            sources: list[Waitable] = [self._listener, *(end for pair in pairs for end in pair.ends)]
            poll(sources, _POLL_S)
            drafter = self._listener.accept()
            if drafter is not None:
                with contextlib.suppress(SsdError):
                    pairs.append(_Relay(drafter, connect(str(self._behind), 1.0)))
                    self.connections += 1
            for pair in list(pairs):
                if self._garbage:
                    os.write(pair.ends[1].fileno(), b"\xff" * 64)
                self.changed += pair.pass_on(self._schedule)
                if pair.over:
                    pair.close()
                    pairs.remove(pair)
            self._garbage = False
        for pair in pairs:
            pair.close()


class _Relay:
    """Relay of the connection of one drafter, in both directions."""

    def __init__(self, drafter: Channel, verifier: Channel) -> None:
        self.ends = (drafter, verifier)
        self._under_way: list[tuple[float, int, Message, Channel]] = []
        self._numbers = itertools.count()

    @property
    def over(self) -> bool:
        """True if one side has closed the connection."""
        return any(end.closed for end in self.ends)

    def pass_on(self, schedule: Schedule) -> int:
        """Receive, and send what is due; return the number of messages that the schedule has changed."""
        changed, now = 0, time.monotonic()
        for end, other in (self.ends, self.ends[::-1]):
            for message in end.receive():
                fate = (0,) if isinstance(message, SPARED) else schedule(next(self._numbers), message)
                changed += fate != (0,)
                for ticks in fate:
                    due = (now + ticks * TICK_S, next(self._numbers), message, other)
                    heapq.heappush(self._under_way, due)
        while self._under_way and self._under_way[0][0] <= now:
            _, _, message, to = heapq.heappop(self._under_way)
            to.send(message)
        return changed

    def close(self) -> None:
        """Close both sides."""
        for end in self.ends:
            end.close()
