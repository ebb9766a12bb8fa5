"""The servers of one launch under load: closed loop by concurrency, open loop by share of the capacity,
replay of a trace, and what comes after.

One at a time is measured. Knows what runs in which order; figures, servers and requests are other modules'.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from ssd_serve.base.devices import Device
from ssd_serve.base.engine_settings import Mode
from ssd_serve.base.errors import SsdError
from ssd_serve.base.memory import settle_memory
from ssd_serve.bench.load.client import Answer, LoadClient, LoadRequest
from ssd_serve.bench.load.groups import AUTO, turn
from ssd_serve.bench.load.kept import Figures, KeptLoad
from ssd_serve.bench.load.outcome import Burst
from ssd_serve.bench.load.plan import Findings, LoadPlan
from ssd_serve.bench.load.requests import RequestMaker
from ssd_serve.bench.load.resume import ResumePlan, check_resume
from ssd_serve.bench.load.servers import Server, on_cores
from ssd_serve.bench.load.sets import CAPACITY, TRACE, closed, opened, single
from ssd_serve.bench.load.traffic import arriving, capacities, replay_row
from ssd_serve.bench.prompts import refuse_loops
from ssd_serve.bench.statistics import percentile

_REST_S = 0.1
"""Between bursts: the server that was measured comes to rest."""
_ALONE_S = 1.5
_SURVIVOR = 16
"""The request that outlives a burst may become this many times as long as one of it."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """One set of requests for every server: which, and how they are sent."""

    launch: int
    number: int
    concurrency: int
    offered: float = 0.0

    @property
    def name(self) -> str:
        """Under which it is kept."""
        return f"{self.concurrency}:{self.offered}:{self.number}"


class LoadSession:
    """Measures the servers of one launch after the other; what is `kept` is not measured again.

    `sets` are the requests that count, `maker` makes the others; `cores` is None where the client may run
    anywhere.
    """

    def __init__(
        self,
        plan: LoadPlan,
        maker: RequestMaker,
        sets: Mapping[str, Sequence[LoadRequest]],
        cores: Device | None,
        connect: Callable[[Server], LoadClient],
        kept: KeptLoad,
        found: Findings,
        say: Callable[[str], None],
        rest_s: float = _REST_S,
    ) -> None:
        self._plan = plan
        self._maker = maker
        self._sets = sets
        self._cores = cores
        self._connect = connect
        self._kept = kept
        self._found = found
        self._say = say
        self._rest_s = rest_s
        self._warm = False

    async def run(self, launch: int, servers: Mapping[str, Server]) -> None:
        """Closed loop, open loop, resume check, and in the last launch the trace."""
        self._warm = False
        notes, plan = self._found.notes, self._plan
        notes["resolved_modes"] = {name: server.mode for name, server in servers.items()}
        settle_memory()
        with on_cores(self._cores):
            async with self._clients(servers) as clients:
                for concurrency in plan.concurrencies:
                    await self._closed_loop(launch, concurrency, servers, clients)
                if plan.open_loop.shares:
                    await self._open_loop(launch, servers, clients)
                if plan.resume and plan.concurrencies:
                    await self._resume(launch, servers, clients)
                if TRACE in self._sets and launch == plan.launches - 1:
                    await self._replay(clients)
        notes["memory_mib"] = {name: server.memory_mib() for name, server in servers.items()}

    @contextlib.asynccontextmanager
    async def _clients(self, servers: Mapping[str, Server]) -> AsyncGenerator[dict[str, LoadClient]]:
        async with contextlib.AsyncExitStack() as stack:
            yield {
                name: await stack.enter_async_context(self._connect(server))
                for name, server in servers.items()
            }

    async def _closed_loop(
        self,
        launch: int,
        concurrency: int,
        servers: Mapping[str, Server],
        clients: Mapping[str, LoadClient],
    ) -> None:
        plan = self._plan
        pairs = [_Pair(launch, pair, concurrency) for pair in range(launch, plan.pairs, plan.launches)]
        if not self._kept.knows(pair.name for pair in pairs):
            await self._warm_up(launch, concurrency, clients)
        for pair in pairs:
            await self._pair(pair, self._sets[closed(concurrency, pair.number)], servers, clients)
        self._tell(launch, f"concurrency {concurrency}", (0.0, concurrency))

    async def _warm_up(self, launch: int, concurrency: int, clients: Mapping[str, LoadClient]) -> None:
        self._warm = True
        warm_up = self._requests(f"warm-up:{launch}:{concurrency}", concurrency)
        for name in () if self._plan.fresh else sorted(clients):
            await clients[name].closed_loop(warm_up, concurrency)
            for number in range(self._plan.learning if name.startswith(AUTO) else 0):
                some = self._requests(
                    f"learning:{launch}:{concurrency}:{number}", self._plan.size(concurrency)
                )
                await clients[name].closed_loop(some, concurrency)

    async def _open_loop(
        self, launch: int, servers: Mapping[str, Server], clients: Mapping[str, LoadClient]
    ) -> None:
        """The same arrivals to every server, at shares of what the best of them can do."""
        plan = self._plan.open_loop
        runs = range(launch, plan.runs, self._plan.launches)
        pairs = [_Pair(launch, run, 0, share) for share in plan.shares for run in runs]
        if not self._warm and not self._kept.knows(pair.name for pair in pairs):
            await self._warm_up(launch, self._plan.crowd, clients)
        if not self._found.capacities:
            measure = partial(capacities, clients, self._sets[CAPACITY], self._plan.crowd, self._rest_s)
            found = await self._kept.figures("capacities", measure)
            self._found.capacities |= msgspec.convert(found, dict[str, float])
        capacity = max(self._found.capacities.values())
        for share in plan.shares:
            for pair in (pair for pair in pairs if pair.offered == share):
                arrivals = arriving(self._sets[opened(share, pair.number)], share * capacity)
                await self._pair(pair, arrivals, servers, clients)
            self._tell(launch, f"{share:g} of {capacity:.2f} requests/s", (share, 0))

    async def _pair(
        self,
        pair: "_Pair",
        wanted: Sequence[LoadRequest],
        servers: Mapping[str, Server],
        clients: Mapping[str, LoadClient],
    ) -> None:
        """The same requests to every server, one server after the other."""

        async def measured() -> list[Burst]:
            return [
                await self._burst(pair, order, name, wanted, servers, clients[name])
                for order, name in enumerate(turn(sorted(servers), pair.number))
            ]

        self._found.bursts += await self._kept.pair(pair.name, measured)

    async def _burst(
        self,
        pair: "_Pair",
        order: int,
        name: str,
        wanted: Sequence[LoadRequest],
        servers: Mapping[str, Server],
        client: LoadClient,
    ) -> Burst:
        await asyncio.sleep(self._rest_s)
        before = _clocks(servers)
        send = client.open_loop(wanted) if pair.offered else client.closed_loop(wanted, pair.concurrency)
        answers = await send
        shares = _shares(before, _clocks(servers), name)
        _check(name, wanted, answers)
        return Burst(
            *(name, pair.concurrency, pair.launch, pair.number, order, tuple(answers)),
            *shares,
            offered=pair.offered,
        )

    def _requests(self, name: str, count: int) -> list[LoadRequest]:
        return self._maker.burst(name, count, self._plan.mix)

    def _tell(self, launch: int, what: str, load: tuple[float, int]) -> None:
        speeds: dict[str, list[float]] = {}
        for burst in self._found.bursts:
            if (burst.launch, burst.load) == (launch, load):
                speeds.setdefault(burst.mode, []).append(burst.tokens_per_s)
        told = ", ".join(f"{mode} {percentile(some, 50):.1f}" for mode, some in sorted(speeds.items()))
        self._say(f"  {what}: {told} tokens/s")

    async def _resume(
        self, launch: int, servers: Mapping[str, Server], clients: Mapping[str, LoadClient]
    ) -> None:
        """Where drafts can be made: the highest concurrency, then a single request."""
        concurrency = max(self._plan.concurrencies) - 1
        if concurrency < 1:
            return
        (alone,), (survivor,) = self._sets[single(launch)], self._requests(f"survivor:{launch}", 1)
        room = min(server.context for server in servers.values()) - len(survivor.prompt)
        longer = LoadRequest(survivor.prompt, min(room, _SURVIVOR * survivor.tokens), survivor.seed)
        burst = self._requests(f"resume-burst:{launch}", concurrency)
        for name in sorted(servers):
            if servers[name].mode != Mode.AR.value:
                await asyncio.sleep(self._rest_s)
                check = partial(
                    check_resume, clients[name], ResumePlan(alone, longer, burst, concurrency, _ALONE_S)
                )
                seen = await self._kept.figures(f"resume:{name}:{launch}", check)
                self._found.resumes.append({"mode": name, "launch": launch, **seen})

    async def _replay(self, clients: Mapping[str, LoadClient]) -> None:
        """The same arrivals to every server, one server after the other."""
        wanted = self._sets[TRACE]
        for name in sorted(clients):
            self._say(f"  trace: {len(wanted)} requests to {name}")
            await asyncio.sleep(self._rest_s)
            row = await self._kept.figures(f"trace:{name}", partial(self._replayed, name, clients[name]))
            self._found.replays.append(dict(row))

    async def _replayed(self, name: str, client: LoadClient) -> Figures:
        wanted = self._sets[TRACE]
        answers = await client.open_loop(wanted)
        _check(name, wanted, answers)
        return replay_row(name, answers, self._plan.limits)


def _clocks(servers: Mapping[str, Server]) -> tuple[float, float, dict[str, float]]:
    """Wall time, this process's processor time, and that of each server."""
    return time.perf_counter(), time.process_time(), {name: own.cpu_s() for name, own in servers.items()}


def _shares(
    before: tuple[float, float, dict[str, float]], after: tuple[float, float, dict[str, float]], name: str
) -> tuple[float, float, float]:
    """Shares of one core that the client, the server under load and all the others took."""
    wall = after[0] - before[0]
    used = {each: after[2][each] - before[2][each] for each in after[2]}
    own = used.pop(name)
    return (after[1] - before[1]) / wall, own / wall, sum(used.values()) / wall


def _check(name: str, wanted: Sequence[LoadRequest], answers: Sequence[Answer]) -> None:
    """Single failures are counted; a server that answers nothing ends the benchmark, and so does a loop."""
    if answers and all(answer.error for answer in answers):
        raise SsdError(f"the server '{name}' failed every request: {answers[0].error}")
    refuse_loops(name, wanted, (answer.text for answer in answers))
