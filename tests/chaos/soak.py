"""A soak: mixed traffic for a long time while processes are killed and stalled.

Nothing may fail, texts must stay the same, memory must stay flat, and at the end nothing may be held or left.
`python -m tests.chaos.soak --minutes 30` runs it alone; settings come from `SSD_*` variables.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import resolve
from ssd_serve.bench.serve import metric
from tests.chaos.processes import Disturber, ProcessMonitor, RunningServer, Series, served, stop
from tests.chaos.slope import Slope, slope
from tests.chaos.soak_clients import KINDS, Counts, SoakClients, can_chat, open_client, probe

_SAMPLE_S, _PROBE_S, _REPORT_S = 1.0, 4.0, 30.0
_QUIET_S, _SETTLE_S = 30.0, 2.5
_KV_MB, _DRAFT_KV_MB = 16, 4
"""Small caches, so that requests touch all of their memory within the warm-up."""
_HELD = (
    "ssd_num_requests_running",
    "ssd_num_requests_waiting",
    "ssd_kv_cache_usage_perc",
    "ssd_drafter_requests",
)
"""Metrics that must be 0 without requests."""
MAX_MIB_PER_HOUR = 32.0
"""A process leaks if the lower end of its slope's interval is above this."""
MIN_HOURS = 0.1
"""Duration of samples below which a slope is not judged."""
MAX_NEW_DESCRIPTORS = 8


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """Duration, clients, and the roles that may be killed, in the first third of the time only.

    A process disturbance happens about every `disturb_s` seconds; `warm_up_s` is not part of a slope.
    """

    minutes: float
    clients: int = 8
    seed: int = 1
    kills: tuple[str, ...] = ("drafter", "verifier")
    disturb_s: float = 15.0
    warm_up_s: float = 120.0


@dataclass(slots=True)
class SoakResult:
    """Results of a soak test; `held` are metrics after the traffic."""

    requests: dict[str, int]
    failures: list[str]
    probes: int = 0
    disturbances: dict[str, int] = field(default_factory=dict[str, int])
    series: list[Series] = field(default_factory=list[Series])
    held: dict[str, float] = field(default_factory=dict[str, float])
    exit_code: int | None = None
    orphans: list[str] = field(default_factory=list[str])
    leftovers: list[str] = field(default_factory=list[str])


def run_soak(settings: Settings, plan: SoakPlan, report: Callable[[str], None]) -> SoakResult:
    """Soak a server with these settings."""
    changes: dict[str, object] = {
        "draft_kv_memory_mb": min(settings.draft_kv_memory_mb or _DRAFT_KV_MB, _DRAFT_KV_MB),
        "kv_memory_mb": settings.kv_memory_mb or _KV_MB,
    }
    if settings.dtype == "auto":
        changes["dtype"] = "fp32"  # texts are the same in any batch
    counts = Counts()
    with tempfile.TemporaryDirectory(prefix="ssd-soak-") as name:
        with served(settings.model_copy(update=changes), Path(name)) as server:
            monitor = ProcessMonitor(server)
            disturber = Disturber(server, plan.kills, random.Random(plan.seed))
            held = asyncio.run(_session(server, plan, monitor, disturber, counts, report))
            exit_code = stop(server)
        orphans = monitor.orphans()
        leftovers = sorted(path.name for path in server.run_dir.iterdir()) if server.run_dir.is_dir() else []
    return SoakResult(
        dict(counts.done),
        counts.failures,
        counts.probes,
        disturber.done,
        list(monitor.series.values()),
        held,
        exit_code,
        orphans,
        leftovers,
    )


async def _session(
    server: RunningServer,
    plan: SoakPlan,
    monitor: ProcessMonitor,
    disturber: Disturber,
    counts: Counts,
    report: Callable[[str], None],
) -> dict[str, float]:
    """Run traffic and disturbances for the planned time, then wait; return the metrics that are held."""
    until = time.monotonic() + 60 * plan.minutes
    no_more_kills = until - 40 * plan.minutes

    async def progress() -> None:
        memory = {each.name: round(each.memory_mib[-1]) for each in monitor.series.values()}
        report(f"{dict(counts.done)}, {counts.failed} failed, {disturber.done}, MiB {memory}")

    async with open_client(server.url) as http:
        await probe(http, counts)
        context = int((await http.get("/v1/models")).json()["data"][0]["max_model_len"])
        kinds = KINDS if await can_chat(http) else {name: KINDS[name] for name in KINDS if name != "chat"}
        clients = SoakClients(http, kinds, plan.clients, plan.seed, context, counts)
        traffic = asyncio.create_task(clients.run())
        tasks = [
            asyncio.create_task(_every(_SAMPLE_S, lambda: asyncio.to_thread(monitor.sample))),
            asyncio.create_task(_every(_PROBE_S, lambda: probe(http, counts))),
            asyncio.create_task(_every(_REPORT_S, progress)),
        ]
        source = random.Random(plan.seed + 1)
        try:
            while time.monotonic() < until and not traffic.done():
                pause_s = plan.disturb_s * source.uniform(0.5, 1.5)
                await asyncio.sleep(max(0.0, min(pause_s, until - time.monotonic())))
                if time.monotonic() < until:
                    await asyncio.to_thread(disturber.disturb, time.monotonic() < no_more_kills)
            clients.stop.set()
            await traffic
            await probe(http, counts)
        finally:
            for task in (*tasks, traffic):
                task.cancel()
            await asyncio.gather(*tasks, traffic, return_exceptions=True)
        held = await _held_metrics(http)
        await asyncio.to_thread(monitor.sample)
    return held


async def _every(seconds: float, do: Callable[[], Awaitable[object]]) -> None:
    while True:
        await asyncio.sleep(seconds)
        await do()


async def _held_metrics(http: httpx.AsyncClient) -> dict[str, float]:
    """Return the metrics of held resources once all are 0, or after a timeout."""
    deadline = time.monotonic() + _QUIET_S
    await asyncio.sleep(_SETTLE_S)
    while True:
        page = (await http.get("/metrics")).text
        held = {name: metric(page, name) for name in _HELD}
        if not any(held.values()) or time.monotonic() > deadline:
            return held
        await asyncio.sleep(1.0)


def process_slope(series: Series, warm_up_s: float) -> Slope | None:
    """Return the growth of a process's memory after the warm-up; None for too few samples."""
    start = _after(series, warm_up_s)
    return slope(series.seconds[start:], series.memory_mib[start:])


def _after(series: Series, warm_up_s: float) -> int:
    seconds = series.seconds
    return next((index for index, each in enumerate(seconds) if each - seconds[0] >= warm_up_s), len(seconds))


def problems(result: SoakResult, warm_up_s: float) -> list[str]:
    """Return all problems, in sentences."""
    found = [f"failed: {text}" for text in result.failures]
    if not result.requests:
        found.append("no request was answered")
    found += [f"without requests {name} is {value:g}, not 0" for name, value in result.held.items() if value]
    if result.exit_code != 0:
        found.append(f"the server's exit code was {result.exit_code}, not 0")
    found += [f"still running: {name}" for name in result.orphans]
    found += [f"left in the run directory: {name}" for name in result.leftovers]
    for each in result.series:
        grown = process_slope(each, warm_up_s)
        if grown is not None and grown.hours >= MIN_HOURS and grown.low > MAX_MIB_PER_HOUR:
            found.append(f"{each.name} {each.pid} grows by {grown.value:.0f} MiB an hour")
        before = each.descriptors[min(_after(each, warm_up_s), len(each.descriptors) - 1)]
        if each.descriptors[-1] > before + MAX_NEW_DESCRIPTORS:
            found.append(
                f"{each.name} {each.pid} has {each.descriptors[-1]} descriptors open, before {before}"
            )
    return found


def main() -> int:
    """Run a soak, print its result, and return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill", choices=("drafter", "verifier"), nargs="*", default=["drafter", "verifier"])
    args = parser.parse_args()
    plan = SoakPlan(args.minutes, args.clients, args.seed, tuple(args.kill))
    result = run_soak(resolve({}), plan, lambda line: print(line, file=sys.stderr, flush=True))
    warm_up_s = min(plan.warm_up_s, 20 * plan.minutes)
    for each in result.series:
        print(f"{each.name} {each.pid}: {process_slope(each, warm_up_s)}")
    print(json.dumps({name: value for name, value in asdict(result).items() if name != "series"}, indent=1))
    wrong = problems(result, warm_up_s)
    print("\n".join(wrong) or "nothing was wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
