"""Signs of life of processes that wait for one another: one that hangs without dying is noticed in seconds.

A worker says its name every half second, from a thread of its own; whoever watches hears the names. Knows
names and times, not what the processes do.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

_EVERY_S = 0.5
LONGEST_SILENCE_S = 5.0
_LATE_S = 1.0
"""A watcher that comes this late has been stopped or starved itself: it heard nothing and judges nobody."""


def start_pulse(path: Path, name: str) -> None:
    """Begin to say `name` to the watcher at `path`, until this process ends."""
    threading.Thread(target=_beat, args=(path, name.encode()), name="pulse", daemon=True).start()


def _beat(path: Path, name: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        while True:
            with contextlib.suppress(OSError):  # the watcher is busy or gone; the lifeline knows which
                sender.sendto(name, str(path))
            time.sleep(_EVERY_S)


class Listening(Protocol):
    """Hears signs of life, however they come."""

    def silent(self) -> dict[str, float]:
        """Who has said nothing for too long, and for how many seconds. Ask several times a second."""
        ...

    def forget(self, name: str) -> None:
        """A worker of this name begins anew: it is watched from its first sign of life on."""
        ...

    def close(self) -> None:
        """Hear nobody any more."""
        ...


class PulseWatch:
    """Hears the pulses that are sent to `path`. A worker is watched from its first one on."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self._clock = clock
        self._heard: dict[str, float] = {}
        self._listened = clock()

    def silent(self) -> dict[str, float]:
        """Who has said nothing for too long, and for how many seconds. Ask several times a second."""
        now = self._clock()
        if now - self._listened > _LATE_S:
            self._heard = dict.fromkeys(self._heard, now)
        self._listened = now
        with contextlib.suppress(BlockingIOError):
            while True:
                self._heard[self._socket.recv(256).decode(errors="replace")] = now
        silence = {name: now - heard for name, heard in self._heard.items()}
        return {name: seconds for name, seconds in silence.items() if seconds > LONGEST_SILENCE_S}

    def forget(self, name: str) -> None:
        """A worker of this name begins anew: it is watched from its first sign of life on."""
        self._heard.pop(name, None)

    def close(self) -> None:
        """Hear nobody any more."""
        self._socket.close()
