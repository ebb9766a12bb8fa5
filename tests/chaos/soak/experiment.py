"""Run a server under mixed traffic for a long time while processes are killed and stalled.

What must come out: nothing fails that should not, texts stay the same, memory stays flat, and in the end
nothing is held, nothing runs and nothing lies about. Knows the order of things; clients, processes and
figures are in files of their own.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]

from ssd_serve.base.settings import Settings
from ssd_serve.bench.load.servers import Server, served
from ssd_serve.bench.metrics_page import metric
from tests.chaos.soak.clients import KINDS, Counted, SoakClients, can_chat, client, probe
from tests.chaos.soak.processes import Disturber, Family
from tests.chaos.soak.report import judge, process_figures

Say = Callable[[str], None]

_NAME = "soak"
_SAMPLE_S, _PROBE_S, _SAY_S = 1.0, 4.0, 30.0
_QUIET_S = 30.0
_SETTLE_S = 2.5
"""The engine tells its figures once a second."""
_END_S = 60.0
_KV_MB, _DRAFT_KV_MB = 16, 4
"""So little that requests have touched all of it within the warm-up."""
_HELD = (
    "ssd_num_requests_running",
    "ssd_num_requests_waiting",
    "ssd_kv_cache_usage_perc",
    "ssd_drafter_requests",
)
"""What must be 0 when nobody asks anything. Slots that a prefix reference keeps count as in use."""
_TOLD = (
    "ssd_engine_restarts_total",
    "ssd_requests_resumed_total",
    "ssd_generation_tokens_total",
    "ssd_num_preemptions_total",
    "ssd_prefix_cache_hits_total",
)


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """How long, how many clients, and whose processes may be killed when one is disturbed, every `disturb_s`
    seconds or so. Kills come in the first third: who lives long can be judged by its memory."""

    minutes: float
    clients: int = 8
    seed: int = 1
    kills: tuple[str, ...] = ("drafter", "verifier")
    disturb_s: float = 15.0
    warm_up_s: float = 120.0
    """What is left out of a process's slope; at most a third of the run."""


@dataclass(slots=True)
class End:
    """How it was in the end."""

    held: dict[str, float]
    told: dict[str, float]
    exit_code: int | None = None
    orphans: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()


def run_soak(settings: Settings, plan: SoakPlan, say: Say) -> dict[str, object]:
    """Soak a server with these settings; the result says in `problems` what was off."""
    settings = soaked(settings)
    with tempfile.TemporaryDirectory(prefix="ssd-soak-") as name:
        folder = Path(name)
        with served({_NAME: settings}, folder) as servers:
            server = servers[_NAME]
            say(f"{server.mode} on {server.url} for {plan.minutes:g} minutes")
            family, counted = Family(server.processes[0]), Counted()
            disturber = Disturber(family, plan.kills, random.Random(plan.seed))
            end = asyncio.run(_session(server, plan, family, disturber, counted, say))
            end.exit_code = _leave(server.processes[0])
        end.orphans = tuple(family.orphans())
        run_dir = folder / f"run-{_NAME}"
        end.leftovers = tuple(sorted(path.name for path in run_dir.iterdir())) if run_dir.is_dir() else ()
    processes = process_figures(family.series.values(), min(plan.warm_up_s, 20 * plan.minutes))
    result: dict[str, object] = {
        "benchmark": "soak",
        "plan": asdict(plan),
        "mode": server.mode,
        "requests": dict(counted.done),
        "failed": counted.failed,
        "failures": counted.failures,
        "probes": counted.probes,
        "disturbances": disturber.done,
        "processes": [asdict(each) for each in processes],
        "end": asdict(end),
    }
    result["problems"] = judge(result)
    return result


def soaked(settings: Settings) -> Settings:
    """With small caches: memory that is touched for the first time would look like a leak. In fp32, where
    texts are the same in any batch."""
    few = min(settings.draft_kv_memory_mb or _DRAFT_KV_MB, _DRAFT_KV_MB)
    changes: dict[str, object] = {"draft_kv_memory_mb": few}
    if settings.kv_memory_mb is None:
        changes["kv_memory_mb"] = _KV_MB
    if settings.dtype == "auto":
        changes["dtype"] = "fp32"
    return settings.model_copy(update=changes)


async def _session(
    server: Server, plan: SoakPlan, family: Family, disturber: Disturber, counted: Counted, say: Say
) -> End:
    """Traffic and disturbances for the planned time, then silence; returns what is held then."""
    until = time.monotonic() + 60 * plan.minutes
    no_more_kills = until - 40 * plan.minutes
    async with client(server.url) as http:
        await probe(http, counted)
        kinds = KINDS if await can_chat(http) else {name: KINDS[name] for name in KINDS if name != "chat"}
        crowd = SoakClients(http, kinds, plan.clients, plan.seed, server.context, counted)
        running = asyncio.create_task(crowd.run())
        beside = [
            asyncio.create_task(_every(_SAMPLE_S, lambda: asyncio.to_thread(family.sample))),
            asyncio.create_task(_every(_PROBE_S, lambda: probe(http, counted))),
            asyncio.create_task(_every(_SAY_S, lambda: _tell(counted, disturber, family, say))),
        ]
        source = random.Random(plan.seed + 1)
        try:
            while time.monotonic() < until and not running.done():
                pause_s = plan.disturb_s * source.uniform(0.5, 1.5)
                await asyncio.sleep(max(0.0, min(pause_s, until - time.monotonic())))
                if time.monotonic() < until:
                    await asyncio.to_thread(disturber.disturb, time.monotonic() < no_more_kills)
            crowd.stop.set()
            await running
            await probe(http, counted)
        finally:
            for task in (*beside, running):
                task.cancel()
            await asyncio.gather(*beside, running, return_exceptions=True)
        end = await _quiet(http)
        await asyncio.to_thread(family.sample)
    return end


async def _every(seconds: float, do: Callable[[], Awaitable[object]]) -> None:
    while True:
        await asyncio.sleep(seconds)
        await do()


async def _tell(counted: Counted, disturber: Disturber, family: Family, say: Say) -> None:
    newest = {each.name: each.memory_mib[-1] for each in family.series.values() if each.memory_mib}
    memory = ", ".join(f"{name} {mib:.0f}" for name, mib in newest.items())
    say(
        f"{sum(counted.done.values())} requests, {counted.failed} failed, {counted.probes} probes, "
        f"{sum(disturber.done.values())} disturbances; MiB: {memory}"
    )


async def _quiet(http: httpx.AsyncClient) -> End:
    """Wait until nothing is held any more, or for as long as that may take."""
    deadline = time.monotonic() + _QUIET_S
    await asyncio.sleep(_SETTLE_S)
    while True:
        text = (await http.get("/metrics")).text
        held = {name: metric(text, name) for name in _HELD}
        if not any(held.values()) or time.monotonic() > deadline:
            return End(held, {name: metric(text, name) for name in _TOLD})
        await asyncio.sleep(1.0)


def _leave(process: psutil.Process) -> int | None:
    """End the server as a process manager does; None where it does not end."""
    try:
        process.terminate()
        code: int | None = process.wait(_END_S)
    except psutil.Error:
        return None
    return code
