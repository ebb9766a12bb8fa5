"""The processes of a server under soak: how much each holds, and disturbing them on purpose.

A process that was started again is another one with its own series. Knows processes by their titles; not what
they do.
"""

import contextlib
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import psutil  # type: ignore[import-untyped]

from tests.chaos.processes import by_name

_KILLED: Mapping[str, float] = {"drafter": 0.5, "verifier": 0.2}
"""How often one that is disturbed is killed, else it is stalled. A verifier takes longer to come back."""
_MIN_STALL_S, _MAX_STALL_S = 0.2, 1.5


@dataclass(slots=True)
class Series:
    """What one process held, second by second."""

    name: str
    pid: int
    seconds: list[float] = field(default_factory=list[float])
    memory_mib: list[float] = field(default_factory=list[float])
    """Resident; shared pages count in proportion where that is known."""
    descriptors: list[int] = field(default_factory=list[int])
    threads: list[int] = field(default_factory=list[int])


class Family:
    """A server's process and its children, those included that come later."""

    def __init__(self, server: psutil.Process) -> None:
        self._server = server
        self._began = time.monotonic()
        self.series: dict[int, Series] = {}
        self._seen: dict[int, psutil.Process] = {}

    def sample(self) -> None:
        """Look at every process that lives now."""
        for name, process in self.living().items():
            with contextlib.suppress(psutil.Error):
                series = self.series.setdefault(process.pid, Series(name, process.pid))
                memory = process.memory_full_info()
                held = (process.num_fds(), process.num_threads())
                series.seconds.append(time.monotonic() - self._began)
                series.memory_mib.append(getattr(memory, "pss", memory.rss) / 2**20)
                series.descriptors.append(held[0])
                series.threads.append(held[1])

    def living(self) -> dict[str, psutil.Process]:
        """Processes by name: `server`, `verifier`, `drafter-0`."""
        found = by_name(self._server)
        self._seen.update({process.pid: process for process in found.values()})
        return found

    def orphans(self, patience_s: float = 10.0) -> list[str]:
        """Processes that were seen and live although their server has ended."""
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=patience_s)
        return [
            f"{self.series[each.pid].name if each.pid in self.series else '?'} {each.pid}" for each in alive
        ]


class Disturber:
    """Kills and stalls processes at random. `kills`: whose may be killed; one of each comes first."""

    def __init__(self, family: Family, kills: tuple[str, ...], source: random.Random) -> None:
        self._family = family
        self._kills = kills
        self._owed = list(kills)
        self._source = source
        self.done: dict[str, int] = {}

    def disturb(self, may_kill: bool, sleep: Callable[[float], None] = time.sleep) -> str:
        """Do one thing; returns what, in words."""
        workers = {name: each for name, each in self._family.living().items() if name != "server"}
        if not workers:
            return ""
        owed = [name for name in workers if _role(name) in self._owed]
        name = owed[0] if owed else self._source.choice(sorted(workers))
        role, process = _role(name), workers[name]
        chance = _KILLED.get(role, 0.0) if role in self._kills else 0.0
        kill = bool(owed) or (may_kill and self._source.random() < chance)
        with contextlib.suppress(psutil.Error):
            if kill:
                process.kill()
            else:
                _stall(process, self._source.uniform(_MIN_STALL_S, _MAX_STALL_S), sleep)
        if owed:
            self._owed.remove(role)
        what = f"{'killed' if kill else 'stalled'} {role}"
        self.done[what] = self.done.get(what, 0) + 1
        return what


def _role(name: str) -> str:
    return name.partition("-")[0]


def _stall(process: psutil.Process, seconds: float, sleep: Callable[[float], None]) -> None:
    """SIGSTOP, and SIGCONT whatever happens meanwhile."""
    process.send_signal(signal.SIGSTOP)
    try:
        sleep(seconds)
    finally:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGCONT)
