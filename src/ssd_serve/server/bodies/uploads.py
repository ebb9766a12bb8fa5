"""The memory that bodies take before they are answered, bounded over all requests together.

What counts is what has arrived, not what was announced. Who uploads slowly makes room for others.
"""

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress

from ssd_serve.server.errors import ApiError, unavailable

_LOOK_EVERY_S = 0.25


class Upload:
    """One body, while it arrives (`reading`) and until it is let go."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.held = 0
        self.waiting = False
        self.reading: asyncio.Future[bytearray] | None = None
        self.turned_away = False


class Uploads:
    """All bodies that are held. Those of at most `free` bytes do not count: small ones never wait."""

    def __init__(self, most: int, free: int, grace_s: float) -> None:
        self._most = most
        self._free = free
        self._grace_s = grace_s
        self._all: set[Upload] = set()
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self.held = 0
        """Bytes of all bodies that count."""

    @contextmanager
    def open(self) -> Generator[Upload, None, None]:
        """Hold a body for as long as the block runs."""
        upload = Upload()
        self._all.add(upload)
        try:
            yield upload
        finally:
            self._all.discard(upload)
            self.held -= upload.held
            self._freed.set()

    async def take(self, upload: Upload, received: int) -> None:
        """Count the body, of which so much has arrived. Waits until there is room, in order of asking."""
        if received <= self._free:
            return
        upload.waiting = True
        async with self._turn:
            more = received - upload.held
            while self.held + more > self._most:
                self._turn_away_the_slow()
                await self._wait()
            upload.held += more
            self.held += more
        upload.waiting = False

    def _turn_away_the_slow(self) -> None:
        """Of those that have had their time and still arrive, end the one that holds most."""
        late = time.monotonic() - self._grace_s
        slow = [(one.held, one.reading, one) for one in self._all if one.reading and one.began < late]
        if slow:
            _, reading, upload = max(slow, key=lambda each: each[0])
            upload.turned_away = True
            reading.cancel()

    async def _wait(self) -> None:
        self._freed.clear()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._freed.wait(), _LOOK_EVERY_S)


def no_room() -> ApiError:
    """503: the body came too slowly while others needed its room, or found none."""
    return unavailable("the server holds as many request bodies as it may; send it again", "bodies_full")
