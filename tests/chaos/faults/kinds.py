"""The faults of the fault benchmark: how each strikes, how long it lasts, how its being noticed is seen."""

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import psutil  # type: ignore[import-untyped]

from ssd_serve.base.errors import SsdError
from ssd_serve.bench.memory_channel import FaultRates
from tests.chaos.faults.proxy import MessageFaults
from tests.chaos.faults.readers import never_read, read_slowly
from tests.chaos.faults.site import Site

Heal = Callable[[], dict[str, float]]
"""Ends the fault, and tells what else was seen."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`noticed(site, pids before)` is asked until it is true; None: nobody should notice anything."""

    name: str
    strike: Callable[[Site, MessageFaults | None], Heal]
    noticed: Callable[[Site, dict[str, int]], bool] | None = None
    lasts_s: float = 0.0
    survives: bool = True
    """Whether the server itself goes on."""

    @property
    def interrupts(self) -> bool:
        """Whether no stream that is under way can go on before the fault is noticed."""
        return self.noticed is _unhealthy


def faults_of(kind: Literal["processes", "messages"]) -> tuple[Fault, ...]:
    """The faults that one server bears one after the other."""
    return _PROCESSES if kind == "processes" else _MESSAGES


def node_lost(lose: Callable[[], None]) -> Fault:
    """The node with the target and the drafter, while another one is idle."""

    def strike(_site: Site, _proxy: MessageFaults | None) -> Heal:
        lose()
        return _nothing

    return Fault("a node of the Ray cluster lost", strike, _unhealthy)


def _nothing() -> dict[str, float]:
    return {}


def _signal(name: str, number: signal.Signals) -> Callable[[Site, MessageFaults | None], Heal]:
    def strike(site: Site, _proxy: MessageFaults | None) -> Heal:
        site.signal(name, number)
        return _nothing

    return strike


def _pause_server(site: Site, _proxy: MessageFaults | None) -> Heal:
    site.signal("server", signal.SIGSTOP)

    def heal() -> dict[str, float]:
        site.signal("server", signal.SIGCONT)
        return {}

    return heal


def _unhealthy(site: Site, _before: dict[str, int]) -> bool:
    return not site.healthy()


def _reaped(name: str) -> Callable[[Site, dict[str, int]], bool]:
    """Its parent has seen its end."""
    return lambda _site, before: not psutil.pid_exists(before[name])


def _all_gone(_site: Site, before: dict[str, int]) -> bool:
    return not any(_runs(pid) for name, pid in before.items() if name != "server")


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _messages(rates: FaultRates) -> Callable[[Site, MessageFaults | None], Heal]:
    def strike(_site: Site, proxy: MessageFaults | None) -> Heal:
        if proxy is None:
            raise SsdError("message faults need a proxy")
        before = proxy.changed
        proxy.use(rates, seed=7)

        def heal() -> dict[str, float]:
            proxy.use(None)
            return {"messages_changed": proxy.changed - before}

        return heal

    return strike


_UNEVEN = FaultRates(delay=0.6, max_ticks=10)
_PROCESSES = (
    Fault("nothing", lambda _site, _proxy: _nothing),
    Fault("kill -9 of the verifier", _signal("verifier", signal.SIGKILL), _unhealthy),
    Fault("SIGSTOP of the verifier", _signal("verifier", signal.SIGSTOP), _unhealthy),
    Fault("kill -9 of the drafter", _signal("drafter-0", signal.SIGKILL), _reaped("drafter-0")),
    Fault("SIGSTOP of the drafter", _signal("drafter-0", signal.SIGSTOP), _reaped("drafter-0")),
    Fault("SIGSTOP of the server for 8 s", _pause_server, _unhealthy, lasts_s=8.0),
    Fault("clients that never read", lambda site, _proxy: never_read(site.url), lasts_s=3.0),
    Fault("clients that read slowly", lambda site, _proxy: read_slowly(site.url), lasts_s=3.0),
)
_MESSAGES = (
    Fault("messages dropped (20 %)", _messages(FaultRates(drop=0.2)), lasts_s=2.0),
    Fault("messages delayed and reordered (60 %, up to 0.1 s)", _messages(_UNEVEN), lasts_s=2.0),
    Fault("messages duplicated (50 %)", _messages(FaultRates(duplicate=0.5)), lasts_s=2.0),
    Fault("all of these", _messages(FaultRates(0.1, 0.2, 0.4, 10)), lasts_s=2.0),
    Fault("every message dropped", _messages(FaultRates(drop=1.0)), lasts_s=2.0),
)
RANK_FAULTS = (
    Fault("kill -9 of rank 1", _signal("rank-1", signal.SIGKILL), _unhealthy),
    Fault("SIGSTOP of rank 1", _signal("rank-1", signal.SIGSTOP), _unhealthy),
)
SERVER_KILLED = Fault("kill -9 of the server", _signal("server", signal.SIGKILL), _all_gone, survives=False)
