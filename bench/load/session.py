"""`ssd bench load`: servers under load. Closed loop by concurrency, replay of a trace, and what comes after.

Every way to run is a launched server. All of them are up at the same time and one at a time is measured, so
that the measurements of a pair lie seconds apart; all are launched anew a few times, because a launch can be
lucky with its memory. Knows what runs in which order; figures, servers and requests are other modules'.
"""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ssd_serve.bench.emulated import emulated_table
from ssd_serve.bench.load.client import Answer, Endpoint, LoadClient, Wanted
from ssd_serve.bench.load.conditions import busy, empty_cache
from ssd_serve.bench.load.groups import AUTO
from ssd_serve.bench.load.outcome import Burst, pairs, ratios, results
from ssd_serve.bench.load.requests import Mix, RequestMaker
from ssd_serve.bench.load.resume import ResumePlan, check_resume
from ssd_serve.bench.load.servers import Server, on_cores, served
from ssd_serve.bench.load.setups import Devices, setups
from ssd_serve.bench.load.statistics import Limits, summary, throughput
from ssd_serve.bench.load.trace import Arrival, fit, read_trace
from ssd_serve.bench.prompts import held_out_prompts
from ssd_serve.bench.statistics import percentile
from ssd_serve.bench.workload import ballast_pair
from ssd_serve.devices import Device, this_machine
from ssd_serve.errors import SsdError, UserError
from ssd_serve.memory import settle_memory
from ssd_serve.models.hub import find_model, resolve_model
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.settings import EMBEDDED, Mode, Settings

_FEWEST = 4
"""Requests of a burst at least: at concurrency 1 a burst of two would be mostly chance."""
_REST_S = 0.1
"""Between bursts: the server that was measured comes to rest."""
_ALONE_S = 1.5
_SURVIVOR = 16
"""The request that outlives a burst may become this many times as long as one of it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. `launches` share the pairs out; every launch has its own warm-up and resume check.

    `learning` bursts more warm up the modes that choose by measuring; a `fresh` launch remembers nothing of
    the last and has no warm-up at all. `busy_core` is kept busy from when the servers are up. Without
    `concurrencies` there is no closed loop.
    """

    modes: tuple[str, ...]
    concurrencies: tuple[int, ...]
    pairs: int
    launches: int
    learning: int
    fresh: bool
    busy_core: int | None
    waves: int
    tokens: int
    prompt_tokens: int
    temperature: float
    limits: Limits
    ballast: bool
    devices: Devices
    resume: bool
    trace: Path | None
    time_scale: float
    trace_seconds: float


@dataclass(slots=True)
class Found:
    """What was measured so far, of all launches."""

    bursts: list[Burst]
    replays: list[dict[str, object]]
    resumes: list[dict[str, object]]
    notes: dict[str, object]


def run_load(settings: Settings, plan: Plan, say: Callable[[str], None]) -> dict[str, object]:
    """`{"benchmark": "load", "plan", "results", "pairs", "ratios", "trace", "resume", "notes"}`.

    Raises `UserError` for a trace that cannot be read, `SsdError` for a server that does not start.
    """
    table = emulated_table(settings)
    if plan.ballast and (settings.target != EMBEDDED or settings.draft_model != EMBEDDED or table):
        raise UserError(
            "--ballast enlarges the embedded pair: leave out --target, --draft and --model-wrapper"
        )
    trace = read_trace(plan.trace) if plan.trace is not None else []
    target = find_model(settings, settings.target, "target")
    maker = RequestMaker(held_out_prompts(resolve_model(EMBEDDED, "target"), Tokenizer(target)))
    setting = "emulated" if table else "ballast" if plan.ballast else "real"
    found = Found([], [], [], {})
    with tempfile.TemporaryDirectory(prefix="ssd-load-") as name:
        folder = Path(name)
        own = settings.model_copy(update={"prefix_cache": False, "generation_config": "none"})
        if plan.ballast:
            say("writing the ballast pair")
            own = own.model_copy(update=ballast_pair(folder))
        if plan.fresh:
            own = own.model_copy(update={"cache_dir": folder / "cache"})
        chosen = setups(own, plan.modes, plan.devices, this_machine())
        found.notes.update(chosen.described())
        found.notes["device_table"] = table
        connect = _connector(plan.temperature, own.api_key)
        session = Session(plan, maker, trace, chosen.client, connect, found, say)
        for launch in range(plan.launches):
            order = _turn(list(chosen.servers), launch)
            say(f"launch {launch + 1} of {plan.launches}: starting {', '.join(order)}")
            if plan.fresh:
                empty_cache(folder / "cache", settings.cache_dir)
            with (
                served({each: chosen.servers[each] for each in order}, folder) as servers,
                busy(plan.busy_core),
            ):
                asyncio.run(session.run(launch, servers))
    return {
        "benchmark": "load",
        "plan": {**asdict(plan), "trace": plan.trace is not None, "setting": setting},
        "results": results(found.bursts, setting, plan.limits),
        "pairs": pairs(found.bursts, setting),
        "ratios": ratios(found.bursts, setting),
        "trace": found.replays,
        "resume": found.resumes,
        "notes": found.notes,
    }


class Session:
    """Measures the servers of one launch after the other, and keeps what it finds.

    `trace` is empty where none is replayed, `cores` None where the client may run anywhere.
    """

    def __init__(
        self,
        plan: Plan,
        maker: RequestMaker,
        trace: Sequence[Arrival],
        cores: Device | None,
        connect: Callable[[Server], LoadClient],
        found: Found,
        say: Callable[[str], None],
        rest_s: float = _REST_S,
    ) -> None:
        self._plan = plan
        self._maker = maker
        self._trace = trace
        self._cores = cores
        self._connect = connect
        self._found = found
        self._say = say
        self._rest_s = rest_s

    async def run(self, launch: int, servers: Mapping[str, Server]) -> None:
        """Closed loop, resume check, and in the last launch the trace."""
        notes, plan = self._found.notes, self._plan
        least = min(server.context for server in servers.values())
        if plan.concurrencies and plan.prompt_tokens + plan.tokens > least:
            raise UserError(f"--prompt-tokens and --tokens together must not exceed the context of {least}")
        notes["resolved_modes"] = {name: server.mode for name, server in servers.items()}
        settle_memory()
        with on_cores(self._cores):
            async with self._clients(servers) as clients:
                for concurrency in plan.concurrencies:
                    await self._closed_loop(launch, concurrency, servers, clients)
                if plan.resume and plan.concurrencies:
                    await self._resume(launch, servers, clients)
                if self._trace and launch == plan.launches - 1:
                    await self._replay(servers, clients)
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
        plan, names = self._plan, sorted(servers)
        warm_up = self._requests(f"warm-up:{launch}:{concurrency}", concurrency)
        for name in () if plan.fresh else names:
            await clients[name].closed_loop(warm_up, concurrency)
            for turn in range(plan.learning if name.startswith(AUTO) else 0):
                wanted = self._requests(f"learning:{launch}:{concurrency}:{turn}", self._size(concurrency))
                await clients[name].closed_loop(wanted, concurrency)
        for pair in range(launch, plan.pairs, plan.launches):
            wanted = self._requests(f"{concurrency}:{pair}", self._size(concurrency))
            for order, name in enumerate(_turn(names, pair)):
                await asyncio.sleep(self._rest_s)
                before = _clocks(servers)
                answers = await clients[name].closed_loop(wanted, concurrency)
                shares = _shares(before, _clocks(servers), name)
                _check(name, answers)
                self._found.bursts.append(
                    Burst(name, concurrency, launch, pair, order, tuple(answers), *shares)
                )
        self._tell(launch, concurrency)

    def _size(self, concurrency: int) -> int:
        return max(_FEWEST, self._plan.waves * concurrency)

    def _requests(self, name: str, count: int) -> list[Wanted]:
        return self._maker.burst(
            name, count, Mix(self._plan.prompt_tokens, self._plan.prompt_tokens, self._plan.tokens)
        )

    def _tell(self, launch: int, concurrency: int) -> None:
        speeds: dict[str, list[float]] = {}
        for burst in self._found.bursts:
            if (burst.launch, burst.concurrency) == (launch, concurrency):
                speeds.setdefault(burst.mode, []).append(burst.tokens_per_s)
        told = ", ".join(f"{mode} {percentile(some, 50):.1f}" for mode, some in sorted(speeds.items()))
        self._say(f"  concurrency {concurrency}: {told} tokens/s")

    async def _resume(
        self, launch: int, servers: Mapping[str, Server], clients: Mapping[str, LoadClient]
    ) -> None:
        """Where drafts can be made: the highest concurrency, then a single request."""
        concurrency = max(self._plan.concurrencies) - 1
        if concurrency < 1:
            return
        single, survivor = self._requests(f"resume:{launch}", 2)
        room = min(server.context for server in servers.values()) - len(survivor.prompt)
        longer = Wanted(survivor.prompt, min(room, _SURVIVOR * survivor.tokens), survivor.seed)
        burst = self._requests(f"resume-burst:{launch}", concurrency)
        for name in sorted(servers):
            if servers[name].mode != Mode.AR.value:
                await asyncio.sleep(self._rest_s)
                seen = await check_resume(
                    clients[name], ResumePlan(single, longer, burst, concurrency, _ALONE_S)
                )
                self._found.resumes.append({"mode": name, "launch": launch, **seen})

    async def _replay(self, servers: Mapping[str, Server], clients: Mapping[str, LoadClient]) -> None:
        """The same arrivals to every server, one server after the other."""
        plan = self._plan
        context = min(server.context for server in servers.values())
        replay = fit(self._trace, time_scale=plan.time_scale, seconds=plan.trace_seconds, context=context)
        told = asdict(replay) | {"arrivals": len(replay.arrivals), "context": context}
        self._found.notes["trace"] = told
        wanted = self._maker.replay(replay.arrivals)
        for name in sorted(servers):
            self._say(f"  trace: {len(wanted)} requests to {name}")
            await asyncio.sleep(self._rest_s)
            answers = await clients[name].open_loop(wanted)
            _check(name, answers)
            late = [1e3 * (answer.sent_s - answer.due_s) for answer in answers]
            self._found.replays.append(
                {
                    "mode": name,
                    "tokens_per_s": round(throughput(answers), 2),
                    **summary(answers, plan.limits),
                    "client_late_ms_p99": round(percentile(late, 99), 2),
                }
            )


def _connector(temperature: float, api_key: str | None) -> Callable[[Server], LoadClient]:
    return lambda server: LoadClient(Endpoint(server.url, temperature, api_key))


def _turn(names: Sequence[str], index: int) -> list[str]:
    """The names from another one on each time, and every second time backwards."""
    start = index % len(names)
    order = [*names[start:], *names[:start]]
    return order[::-1] if index % 2 else order


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


def _check(name: str, answers: Sequence[Answer]) -> None:
    """Single failures are counted; a server that answers nothing ends the benchmark."""
    if answers and all(answer.error for answer in answers):
        raise SsdError(f"the server '{name}' failed every request: {answers[0].error}")
