"""Kill and hang processes, lose messages, stop reading; compare texts and clients' errors.

Every fault strikes in the middle of the same streams, whose tokens must be those of an undisturbed run. Knows
faults and figures; clients and servers are elsewhere.
"""

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from ssd_serve.base.engine_settings import Mode
from ssd_serve.base.errors import SsdError
from ssd_serve.base.settings import Settings
from ssd_serve.bench.emulated import emulated_table
from ssd_serve.bench.load.servers import served
from tests.chaos.faults.client import Clients, Heard, Wish, over_before, wishes
from tests.chaos.faults.judge import judge
from tests.chaos.faults.kinds import RANK_FAULTS, SERVER_KILLED, Fault, faults_of, node_lost
from tests.chaos.faults.proxy import MessageFaults
from tests.chaos.faults.ray_nodes import two_nodes
from tests.chaos.faults.report import FaultOutcome
from tests.chaos.faults.site import Site

_BEGUN = 8
"""Tokens that every client has when the fault strikes."""
_LOOK_EVERY_S = 0.02
_A_STALL_S = 0.5
"""Shorter waits than this are between any two rounds of a busy machine."""
_NAME = "faults"


@dataclass(frozen=True, slots=True)
class FaultsPlan:
    """How much to run. `only`: faults whose names hold one of these words; empty: all."""

    requests: int = 8
    tokens: int = 1280
    only: tuple[str, ...] = ()
    ray: bool = False
    """Also lose a node of a simulated Ray cluster."""

    def wants(self, fault: Fault) -> bool:
        """Whether the fault is to be tried."""
        return not self.only or any(word in fault.name for word in self.only)


def run_faults(settings: Settings, plan: FaultsPlan, say: Callable[[str], None]) -> dict[str, object]:
    """`{"outcomes", "plan", "settings"}`."""
    outcomes: list[FaultOutcome] = []
    with tempfile.TemporaryDirectory(prefix="ssd-bench-") as folder:
        numbers = itertools.count()
        with _groups(settings, plan) as groups:
            for group in groups:
                place = Path(folder, str(next(numbers)))
                place.mkdir()
                outcomes += asyncio.run(_run_group(group, plan, place, say))
    return {
        "outcomes": [asdict(outcome) for outcome in outcomes],
        "plan": asdict(plan),
        "settings": {"target": settings.target, "dtype": settings.dtype, "emulate": emulated_table(settings)},
    }


@dataclass(frozen=True, slots=True)
class _Group:
    """Faults that one server after another has to bear."""

    settings: Settings
    faults: tuple[Fault, ...]
    proxied: bool = False


@contextlib.contextmanager
def _groups(settings: Settings, plan: FaultsPlan) -> Generator[list[_Group]]:
    one = settings.model_copy(
        update={"mode": Mode.SSD, "launcher": "local", "drain_seconds": 0, "speculation_may_stop": False}
    )
    two = one.model_copy(update={"tensor_parallel": 2})
    groups = [
        _Group(one, faults_of("processes")),
        _Group(one, faults_of("messages"), proxied=True),
        _Group(two, RANK_FAULTS),
        _Group(one, (SERVER_KILLED,)),
    ]
    with contextlib.ExitStack() as stack:
        if plan.ray:
            address, lose = stack.enter_context(two_nodes())
            there = one.model_copy(update={"launcher": "ray", "ray_address": address})
            groups.append(_Group(there, (node_lost(lose),)))
        yield _chosen(groups, plan)


def _chosen(groups: Sequence[_Group], plan: FaultsPlan) -> list[_Group]:
    chosen = [replace(group, faults=tuple(filter(plan.wants, group.faults))) for group in groups]
    return [group for group in chosen if group.faults]


async def _run_group(
    group: _Group, plan: FaultsPlan, folder: Path, say: Callable[[str], None]
) -> list[FaultOutcome]:
    outcomes: list[FaultOutcome] = []
    heard: list[Heard] = []
    async with _site(group, folder) as (site, proxy):
        wished = await asyncio.to_thread(wishes, site.url, plan.requests, plan.tokens)
        undisturbed = await _streams(site.url, wished)
        for fault in group.faults:
            heard = [Heard(wish) for wish in wished]
            outcomes.append(await _strike(group.settings, site, proxy, fault, undisturbed, heard))
            say(str(outcomes[-1]))
    if SERVER_KILLED in group.faults:
        async with _site(group, folder) as (site, _):
            outcomes[-1] = await _go_on(group.settings, site, outcomes[-1], undisturbed, heard)
            say(str(outcomes[-1]))
    return outcomes


@contextlib.asynccontextmanager
async def _site(group: _Group, folder: Path) -> AsyncGenerator[tuple[Site, MessageFaults | None]]:
    """A server, between whose verifier and drafters a proxy may stand."""
    with contextlib.ExitStack() as stack:
        servers = await asyncio.to_thread(stack.enter_context, served({_NAME: group.settings}, folder))
        site = Site(servers[_NAME], folder)
        stack.callback(site.close)
        proxy: MessageFaults | None = None
        if group.proxied:
            proxy = MessageFaults(site.drafter_socket)
            stack.callback(proxy.close)
            before = site.pids()["drafter-0"]
            psutil.Process(before).kill()
            await asyncio.to_thread(site.wait, lambda: site.pids().get("drafter-0", before) != before, 30.0)
            await asyncio.to_thread(site.await_whole, {"drafter-0"}, 1.0)
        yield site, proxy


async def _streams(url: str, wished: Sequence[Wish]) -> list[Heard]:
    heard = [Heard(wish) for wish in wished]
    clients = Clients(url, heard)
    clients.begin()
    await clients.end()
    errors = [one.error for one in heard if one.error]
    if errors:
        raise SsdError(f"an undisturbed request failed: {errors[0]}")
    return heard


async def _strike(
    settings: Settings,
    site: Site,
    proxy: MessageFaults | None,
    fault: Fault,
    undisturbed: Sequence[Heard],
    heard: Sequence[Heard],
) -> FaultOutcome:
    """Begin all streams, let the fault happen, and see what comes of them, in `heard`, and of the server."""
    names, drafters = set(site.pids()), site.metric("ssd_drafters_alive")
    before = site.pids()
    clients = Clients(site.url, heard)
    clients.begin()
    await clients.until_each_has(_BEGUN)
    struck = time.monotonic()
    heal = await asyncio.to_thread(fault.strike, site, proxy)
    noticing = asyncio.create_task(_notice(site, fault, before, struck))
    await asyncio.sleep(fault.lasts_s)
    more = await asyncio.to_thread(heal)
    await clients.end()
    noticed_s = await noticing
    whole_s: float | None = None
    speculates: bool | None = None
    if fault.survives:
        whole_s = round(await asyncio.to_thread(site.await_whole, names, drafters) - struck, 2)
        speculates = await asyncio.to_thread(site.speculates)
    seen = _seen(settings, fault.name, undisturbed, heard, struck)
    if fault.interrupts and noticed_s is not None and over_before(heard, struck + noticed_s):
        seen = replace(seen, errors=(*seen.errors, "no stream was left to interrupt: more tokens"))
    return replace(seen, noticed_s=noticed_s, whole_s=whole_s, speculates=speculates, more=more)


async def _go_on(
    settings: Settings,
    site: Site,
    outcome: FaultOutcome,
    undisturbed: Sequence[Heard],
    heard: Sequence[Heard],
) -> FaultOutcome:
    """Somebody has started the server again: who was cut off sends the request with the tokens that came."""
    struck = max((at for one in heard for at in one.times), default=time.monotonic())
    cut_off: dict[str, float] = {
        "tokens_cut_off": outcome.lost,
        "clients_cut_off": sum(bool(one.error) for one in heard),
    }
    clients = Clients(site.url, heard)
    clients.begin()
    await clients.end()
    seen = _seen(settings, outcome.fault, undisturbed, heard, struck)
    errors = (*outcome.errors, *(f"afterwards: {error}" for error in seen.errors))
    return replace(seen, noticed_s=outcome.noticed_s, errors=errors, more=cut_off)


def _seen(
    settings: Settings, fault: str, undisturbed: Sequence[Heard], heard: Sequence[Heard], struck: float
) -> FaultOutcome:
    """What the clients saw."""
    errors = tuple(sorted({one.error for one in heard if one.error}))
    stalls = [one.stall(struck) for one in heard]
    recovered_s = max((end - struck for end, length in stalls if length > _A_STALL_S), default=0.0)
    verdict = judge(settings, undisturbed, heard)
    return FaultOutcome(
        fault=fault,
        lost=verdict.lost,
        wrong=verdict.wrong,
        near_ties=verdict.near_ties,
        recovered_s=None if errors else round(recovered_s, 2),
        stall_s=round(max(length for _, length in stalls), 2),
        errors=errors,
    )


async def _notice(site: Site, fault: Fault, before: dict[str, int], struck: float) -> float | None:
    """Seconds until somebody reacted."""
    while fault.noticed is not None:
        if await asyncio.to_thread(fault.noticed, site, before):
            return round(time.monotonic() - struck, 2)
        await asyncio.sleep(_LOOK_EVERY_S)
    return None
