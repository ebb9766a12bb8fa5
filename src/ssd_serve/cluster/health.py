"""Health of worker processes: heartbeats, hangs, exit codes, and the restart policy."""

import contextlib
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from ssd_serve.base.errors import DeviceHangError, EngineDeadError, MemoryShortError, ProtocolError

PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that workers ignore: their parent decides when they exit."""

ORPHANED = 75
"""Exit code of a worker that has lost, or was released by, its parent or rank 0."""
_EVERY_S = 0.5
_LOADED = b" has loaded"
LONGEST_SILENCE_S = 5.0
_LATE_S = 1.0
"""Delay after which the monitor itself was stopped or starved, so that missed heartbeats do not count."""


def start_pulse(path: Path, name: str) -> Callable[[], None]:
    """Start to send heartbeats of `name` to the socket at `path`, until this process ends. Call the result to
    report that the worker has loaded."""
    loaded = threading.Event()
    threading.Thread(target=_beat, args=(path, name.encode(), loaded), name="pulse", daemon=True).start()
    return loaded.set


def _beat(path: Path, name: bytes, loaded: threading.Event) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        while True:
            with contextlib.suppress(OSError):  # the watcher is busy, or has ended: the lifeline detects that
                sender.sendto(name + _LOADED * loaded.is_set(), str(path))
            time.sleep(_EVERY_S)


class HeartbeatReceiver(ABC):
    """Receiver of heartbeats, by any transport. A worker is watched from its first one on."""

    @abstractmethod
    def silent(self) -> dict[str, float]:
        """Silent workers with the seconds of their silence. Call it several times a second."""

    @abstractmethod
    def has_loaded(self, name: str) -> bool:
        """True if the worker has reported that it has loaded: from then on it has no reason to be silent."""

    @abstractmethod
    def forget(self, name: str) -> None:
        """Reset a restarted worker: it is watched from its first heartbeat on."""

    @abstractmethod
    def close(self) -> None:
        """Stop receiving."""


class PulseWatch(HeartbeatReceiver):
    """Receives the heartbeats that are sent to the socket at `path`."""

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
        self._received_at: dict[str, float] = {}
        self._loaded: set[str] = set()
        self._listened = clock()

    def silent(self) -> dict[str, float]:
        now = self._clock()
        if now - self._listened > _LATE_S:
            self._received_at = dict.fromkeys(self._received_at, now)
        self._listened = now
        with contextlib.suppress(BlockingIOError):
            while True:
                message = self._socket.recv(256)
                name = message.removesuffix(_LOADED).decode(errors="replace")
                self._received_at[name] = now
                if message.endswith(_LOADED):
                    self._loaded.add(name)
        silence = {name: now - received_at for name, received_at in self._received_at.items()}
        return {name: seconds for name, seconds in silence.items() if seconds > self._longest_silence_s}

    def has_loaded(self, name: str) -> bool:
        return name in self._loaded

    def forget(self, name: str) -> None:
        self._received_at.pop(name, None)
        self._loaded.discard(name)

    def close(self) -> None:
        self._socket.close()


_LOOK_S = 5.0
_WORKING = 0.1
"""Share of one core above which a process counts as computing. Heartbeats alone take far less."""
_LONGEST_S = 600.0
"""Longest silence of a busy process: no forward takes so long."""


class HangDetector:
    """Decides whether a silent process hangs."""

    def __init__(self, look_s: float = _LOOK_S) -> None:
        """Set the seconds over which processor time is compared."""
        self._look_s = look_s
        self._seen: tuple[float, float] | None = None

    def is_stuck(self, now: float, silent_s: float, computed_s: float) -> bool:
        """Return True if the process hangs. Call it repeatedly during silence; `computed_s` is its processor time."""
        if silent_s > _LONGEST_S:
            return True
        if self._seen is None or now - self._seen[0] > 2 * self._look_s:
            self._seen = now, computed_s
        since, before = self._seen
        if now - since < self._look_s:
            return False
        self._seen = now, computed_s
        return computed_s - before < _WORKING * (now - since)


USER_ERRORS = range(2, 10)
"""Exit codes of errors that a restart cannot fix (see `errors.py`)."""
_LONGEST_PAUSE_S = 30.0
_LONG_LIFE_S = 10.0
"""Lifetime of a target after which its death counts as a new fault."""
_MAX_QUICK_DEATHS = 6
"""Higher than the number of deaths after which the request that causes them is given up."""


def pause_before_restart(restarts: int) -> float:
    """Seconds to wait before restart number `restarts` (from 0): none, then 0.5, 1, 2, ... up to 30."""
    return 0.0 if restarts == 0 else min(_LONGEST_PAUSE_S, 0.5 * 2.0 ** min(restarts - 1, 10))


class RestartPolicy:
    """Counts the deaths of one target. It is restarted only if it has been ready before: the user should see an
    error at the first start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._worked = False
        self._ready_at: float | None = None
        self._quick_deaths = 0

    @property
    def ready_at(self) -> float | None:
        """Time at which the running target became ready; None while it loads."""
        return self._ready_at

    def ready(self) -> None:
        """Report that the target can generate. May be called from any thread."""
        self._worked = True
        self._ready_at = self._clock()

    def forgive(self) -> None:
        """Reset the count of deaths, since their cause is gone. May be called from any thread."""
        self._quick_deaths = 0

    def pause(self, code: int) -> float | None:
        """Seconds until the restart of a target that ended with this exit code; None: it is not restarted."""
        ready_at, self._ready_at = self._ready_at, None
        quick = ready_at is None or self._clock() - ready_at < _LONG_LIFE_S
        self._quick_deaths = self._quick_deaths + 1 if quick else 0
        # The memory of the dead process may be freed a moment later.
        mended = code not in USER_ERRORS or code == MemoryShortError.exit_code
        if not self._worked or not mended or self._quick_deaths > _MAX_QUICK_DEATHS:
            return None
        return pause_before_restart(self._quick_deaths)


_TELLING = (*USER_ERRORS, EngineDeadError.exit_code, ProtocolError.exit_code, DeviceHangError.exit_code)


class WorkerDiedError(EngineDeadError):
    """Raised when a vital process has ended. `exit_code` is the worker's if it names a reason."""

    def __init__(self, name: str, code: int, how: str = "") -> None:
        super().__init__(f"the {name} process {how or describe_exit(code)}")
        self.worker_code = code
        self.exit_code = code if code in _TELLING else EngineDeadError.exit_code

    @property
    def explained(self) -> bool:
        """True if the worker itself has written the reason to stderr."""
        return self.worker_code in USER_ERRORS


def describe_exit(code: int) -> str:
    """Describe an exit code: `was killed by SIGKILL`, `ended with code 6`."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the system may be out of memory)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
