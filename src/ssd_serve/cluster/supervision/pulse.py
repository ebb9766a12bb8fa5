"""Signs of life of processes that wait for one another: one that hangs without dying is noticed in seconds.

A worker says its name every half second, from a thread of its own, and whether it has loaded; whoever watches
hears that. Knows names and times, not what the processes do.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

_EVERY_S = 0.5
_LOADED = b" has loaded"
LONGEST_SILENCE_S = 5.0
_LATE_S = 1.0
"""A watcher that comes this late has been stopped or starved itself: it heard nothing and judges nobody."""


def start_pulse(path: Path, name: str) -> Callable[[], None]:
    """Begin to say `name` to the watcher at `path`, until this process ends. Call the result to say also that
    it has loaded."""
    loaded = threading.Event()
    threading.Thread(target=_beat, args=(path, name.encode(), loaded), name="pulse", daemon=True).start()
    return loaded.set


def _beat(path: Path, name: bytes, loaded: threading.Event) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        while True:
            with contextlib.suppress(OSError):  # the watcher is busy or gone; the lifeline knows which
                sender.sendto(name + _LOADED * loaded.is_set(), str(path))
            time.sleep(_EVERY_S)


class Listening(Protocol):
    """Hears signs of life, however they come."""

    def silent(self) -> dict[str, float]:
        """Who has said nothing for too long, and for how many seconds. Ask several times a second."""
        ...

    def has_loaded(self, name: str) -> bool:
        """Whether it has said so: then it has no reason to be silent any more."""
        ...

    def forget(self, name: str) -> None:
        """A worker of this name begins anew: it is watched from its first sign of life on."""
        ...

    def close(self) -> None:
        """Hear nobody any more."""
        ...


class PulseWatch:
    """Hears the pulses that are sent to `path`. A worker is watched from its first one on."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        longest_silence_s: float = LONGEST_SILENCE_S,
    ) -> None:
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self._clock = clock
        self._longest_silence_s = longest_silence_s
        self._heard: dict[str, float] = {}
        self._loaded: set[str] = set()
        self._listened = clock()

    def silent(self) -> dict[str, float]:
        """Who has said nothing for too long, and for how many seconds. Ask several times a second."""
        now = self._clock()
        if now - self._listened > _LATE_S:
            self._heard = dict.fromkeys(self._heard, now)
        self._listened = now
        with contextlib.suppress(BlockingIOError):
            while True:
                said = self._socket.recv(256)
                name = said.removesuffix(_LOADED).decode(errors="replace")
                self._heard[name] = now
                if said.endswith(_LOADED):
                    self._loaded.add(name)
        silence = {name: now - heard for name, heard in self._heard.items()}
        return {name: seconds for name, seconds in silence.items() if seconds > self._longest_silence_s}

    def has_loaded(self, name: str) -> bool:
        """Whether it has said so."""
        return name in self._loaded

    def forget(self, name: str) -> None:
        """A worker of this name begins anew: it is watched from its first sign of life on."""
        self._heard.pop(name, None)
        self._loaded.discard(name)

    def close(self) -> None:
        """Hear nobody any more."""
        self._socket.close()
