"""Waiting for many channels and listeners at once. Knows only that they can be waited for."""

import select
import time
from collections.abc import Sequence
from typing import TypeVar

from ssd_serve.transport.channel import Waitable

W = TypeVar("W", bound=Waitable)


def poll(sources: Sequence[W], timeout_s: float) -> list[W]:
    """Those of `sources` that have something to receive or accept (or have ended), waiting for the first.

    Pending bytes are sent meanwhile. A channel that has ended is reported every time: drop it from the list.
    """
    ready = [source for source in sources if source.wait(0.0)]
    deadline = time.monotonic() + timeout_s
    rest = timeout_s  # to the last bit: channels in memory may have a clock of their own
    while not ready:
        if rest <= 0:
            return []
        poller = select.poll()
        kernel = [source for source in sources if source.fileno() >= 0]
        if not kernel:
            return [source for source in sources if source.wait(rest)]
        for source in kernel:
            poller.register(source.fileno(), select.POLLIN | (select.POLLOUT if source.pending else 0))
        poller.poll(rest * 1000)
        ready = [source for source in sources if source.wait(0.0)]
        rest = deadline - time.monotonic()
    return ready
