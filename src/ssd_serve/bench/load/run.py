"""`ssd bench load`: plain, synchronous, SSD and auto as servers under load.

Every way to run is a launched server. All of them are up at the same time and one at a time is measured, so
that the measurements of a pair lie seconds apart; all are launched anew a few times, because a launch can be
lucky with its memory. Knows what is started; what is sent is the session's.
"""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from ssd_serve.base.devices import this_machine
from ssd_serve.base.engine_settings import EMBEDDED, Mode
from ssd_serve.base.errors import UserError
from ssd_serve.base.settings import Settings
from ssd_serve.bench.emulated import emulated_table
from ssd_serve.bench.journal import TimeGiven, name_of, work_folder
from ssd_serve.bench.load.client import Endpoint, LoadClient
from ssd_serve.bench.load.conditions import busy, empty_cache
from ssd_serve.bench.load.groups import turn
from ssd_serve.bench.load.kept import ChosenSets, KeptLoad
from ssd_serve.bench.load.outcome import pairs, ratios, results
from ssd_serve.bench.load.plan import Findings, LoadPlan
from ssd_serve.bench.load.requests import RequestMaker
from ssd_serve.bench.load.servers import Server, served
from ssd_serve.bench.load.session import LoadSession
from ssd_serve.bench.load.sets import Sets, candidate_sets, choose
from ssd_serve.bench.load.setups import setups
from ssd_serve.bench.load.trace import Arrival, fit, read_trace
from ssd_serve.bench.load.traffic import told
from ssd_serve.bench.prompts import held_out_prompts
from ssd_serve.bench.workload import ballast_pair
from ssd_serve.models.hub import find_model, resolve_model
from ssd_serve.models.text.tokenizer import Tokenizer


def run_load(settings: Settings, plan: LoadPlan, say: Callable[[str], None]) -> dict[str, object]:
    """`{"benchmark": "load", "plan", "results", "pairs", "ratios", "capacities", "trace", "resume",
    "notes"}`.

    Raises `UserError` for a trace that cannot be read, `SsdError` for a server that does not start,
    `OutOfTimeError` when the time of this sitting is over.
    """
    table = emulated_table(settings)
    if plan.ballast and (settings.target != EMBEDDED or settings.draft_model != EMBEDDED or table):
        raise UserError(
            "--ballast enlarges the embedded pair: leave out --target, --draft and --model-wrapper"
        )
    trace = read_trace(plan.trace) if plan.trace is not None else []
    target = find_model(settings.engine_config(), settings.target, "target")
    pool = held_out_prompts(resolve_model(EMBEDDED, "target"), Tokenizer(target), plan.mix.longest)
    maker = RequestMaker(pool)
    setting = "emulated" if table else "ballast" if plan.ballast else "real"
    found = Findings()
    with work_folder(plan.work) as work, tempfile.TemporaryDirectory(prefix="ssd-load-") as name:
        folder = Path(name)
        asked = replace(plan, work=None, minutes=None)
        kept = KeptLoad(work, name_of(f"{asked} {settings.model_dump_json()}"), TimeGiven(plan.minutes))
        if kept.earlier:
            say(f"{kept.earlier} pairs are known from before")
        own = settings.model_copy(update={"prefix_cache": plan.mix.shared > 0, "generation_config": "none"})
        if plan.ballast:
            say("writing the ballast pair")
            own = own.model_copy(update=ballast_pair(folder))
        if plan.fresh:
            own = own.model_copy(update={"cache_dir": folder / "cache"})
        chosen = setups(own, plan.modes, plan.devices, this_machine())
        found.notes.update(chosen.described())
        found.notes["device_table"] = table
        connect = _connector(plan.temperature, own.api_key)
        sets = kept.sets(lambda: _sets(own, plan, maker, trace, folder, connect, say))
        found.notes |= {"trace": sets.trace, "left_out": round(sets.sets.left_out, 4)}
        session = LoadSession(plan, maker, sets.sets.requests, chosen.client, connect, kept, found, say)
        for launch in range(plan.launches):
            order = turn(list(chosen.servers), launch)
            say(f"launch {launch + 1} of {plan.launches}: starting {', '.join(order)}")
            if plan.fresh:
                empty_cache(folder / "cache", settings.cache_dir)
            with (
                served({each: chosen.servers[each] for each in order}, folder) as servers,
                busy(plan.busy_core),
            ):
                asyncio.run(session.run(launch, servers))
        found.notes["sittings"] = kept.sittings
    return {
        "benchmark": "load",
        "plan": {**asdict(asked), "trace": plan.trace is not None, "setting": setting},
        "results": results(found.bursts, setting, plan.limits),
        "pairs": pairs(found.bursts, setting),
        "ratios": msgspec.to_builtins(ratios(found.bursts)),
        "capacities": found.capacities,
        "trace": found.replays,
        "resume": found.resumes,
        "notes": found.notes,
    }


def _sets(
    settings: Settings,
    plan: LoadPlan,
    maker: RequestMaker,
    trace: Sequence[Arrival],
    folder: Path,
    connect: Callable[[Server], LoadClient],
    say: Callable[[str], None],
) -> ChosenSets:
    """The requests that count: a plain server of the same weights continues them all, and is gone before
    anybody is measured."""
    plainly = settings.model_copy(update={"mode": Mode.AR, "model_wrapper": None})
    with served({"plain": plainly}, folder) as servers:
        (server,) = servers.values()
        arrivals: Sequence[Arrival] = ()
        of_trace: dict[str, object] | None = None
        if trace:
            replay = fit(
                trace,
                time_scale=plan.time_scale,
                length_scale=plan.length_scale,
                seconds=plan.trace_seconds,
                context=server.context,
            )
            of_trace, arrivals = told(replay, server.context), replay.arrivals
        candidates = candidate_sets(plan, maker, arrivals, server.context)
        say(f"choosing {sum(map(len, candidates.values()))} requests")

        async def chosen() -> Sets:
            async with connect(server) as client:
                return await choose(client, candidates, settings.max_running)

        sets = asyncio.run(chosen())
    say(f"  {sets.left_out:.0%} of those tried are left out, because they loop")
    return ChosenSets(sets, of_trace)


def _connector(temperature: float, api_key: str | None) -> Callable[[Server], LoadClient]:
    return lambda server: LoadClient(Endpoint(server.url, temperature, api_key))
