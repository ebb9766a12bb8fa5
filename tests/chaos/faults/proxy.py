"""Stands between a verifier and its drafters on this machine: drops, delays, repeats and reorders messages.

Takes the place of the verifier's socket file, so that neither side knows of it. Knows messages as things that
are late or lost.
"""

import contextlib
import heapq
import itertools
import threading
import time
from pathlib import Path

from ssd_serve.base.draft_messages import Hello, Message, Refusal
from ssd_serve.base.errors import SsdError
from ssd_serve.bench.memory_channel import FaultRates, Schedule, faultless, seeded
from ssd_serve.transport.channel import Channel, Waitable, poll
from ssd_serve.transport.listener import Listener, connect

TICK_S = 0.01
_LOOK_EVERY_S = 0.005
SPARED = (Hello, Refusal)
"""A stream loses nothing of its beginning; what comes later may be late, lost or doubled anywhere."""


class MessageFaults:
    """Between the drafters that connect from now on and the verifier that listens at `address`."""

    def __init__(self, address: str) -> None:
        self._address = Path(address)
        self._behind = self._address.with_suffix(".behind")
        self._address.rename(self._behind)
        self._listener = Listener.unix(self._address)
        self._schedule: Schedule = faultless
        self.changed = 0
        """Messages that did not arrive once and at once."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="message faults", daemon=True)
        self._thread.start()

    def use(self, rates: FaultRates | None, seed: int = 0) -> None:
        """From now on these faults happen; None: none."""
        self._schedule = faultless if rates is None else seeded(seed, rates)

    def close(self) -> None:
        """Cut the connections; who connects again reaches the verifier itself. A second call does nothing."""
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
            poll(sources, _LOOK_EVERY_S)
            drafter = self._listener.accept()
            if drafter is not None:
                with contextlib.suppress(SsdError):
                    pairs.append(_Relay(drafter, connect(str(self._behind), 1.0)))
            for pair in list(pairs):
                self.changed += pair.pass_on(self._schedule)
                if pair.over:
                    pair.close()
                    pairs.remove(pair)
        for pair in pairs:
            pair.close()


class _Relay:
    """One drafter's connection, both ways."""

    def __init__(self, drafter: Channel, verifier: Channel) -> None:
        self.ends = (drafter, verifier)
        self._under_way: list[tuple[float, int, Message, Channel]] = []
        self._numbers = itertools.count()

    @property
    def over(self) -> bool:
        """Whether one side has left."""
        return any(end.closed for end in self.ends)

    def pass_on(self, schedule: Schedule) -> int:
        """Take what came, send what is due; returns how many messages the schedule has changed."""
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
        """Let both sides know."""
        for end in self.ends:
            end.close()
