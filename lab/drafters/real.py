"""Several drafter processes on this machine's cores, beside a target whose device is emulated.

Processes, sockets and messages are real, and so is time; only the forwards are stretched to a table. Says
how many of the drafters' forwards took longer than that: with more than a few the machine is too slow for
the table. Knows engines and figures; not how drafters share requests.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.drafters.crowd import CrowdPlan, DrafterCrowd
from ssd_serve.bench.emulated import emulating, overrun_share
from ssd_serve.bench.prompts import held_out_prompts
from ssd_serve.bench.rig import EngineWay, Rig, remote_drafter
from ssd_serve.cluster.placement import place
from ssd_serve.devices import pin, this_machine
from ssd_serve.engine_settings import EMBEDDED, Mode
from ssd_serve.memory import settle_memory
from ssd_serve.models.hub import resolve_model
from ssd_serve.settings import Settings
from ssd_serve.verifier.engine import Engine


def run_real_drafters(
    counts: Sequence[int], plan: CrowdPlan, table: str, say: Callable[[str], None]
) -> list[dict[str, object]]:
    """A row for each number of drafters, with expansions a second while all requests decode."""
    with tempfile.TemporaryDirectory(prefix="ssd-drafters-") as told:
        settings = Settings(
            mode=Mode.SSD,
            model_wrapper=emulating(table, Path(told)),
            speculation_may_stop=False,
            draft_width=plan.width,
            draft_fan_out=plan.candidates,
            drafters=max(counts),
        )
        return _rows(settings, counts, plan, say)


def _rows(
    settings: Settings, counts: Sequence[int], plan: CrowdPlan, say: Callable[[str], None]
) -> list[dict[str, object]]:
    placement = place(settings, this_machine())
    pin(placement.target)
    rig = Rig(settings)
    settle_memory()
    rows: list[dict[str, object]] = []
    for count in counts:
        say(f"{count} real drafter{'s' * (count > 1)}")
        engine = rig.engine(EngineWay("ssd"))
        with remote_drafter(rig, engine, str(placement.draft), count):
            rows.append({"drafters": count, **_run(rig, engine, plan)})
    return rows


def _run(rig: Rig, engine: Engine, plan: CrowdPlan) -> dict[str, object]:
    crowd = DrafterCrowd(engine, engine.step)
    crowd.submit(held_out_prompts(resolve_model(EMBEDDED, "target"), rig.tokenizer), plan)
    crowd.run_until(lambda: crowd.decoding)
    started, expansions = time.perf_counter(), engine.drafters.expansions
    clocked, figures = engine.clocked, engine.totals.figures
    rounds, host_s, tokens = clocked.rounds, clocked.host_s, figures.tokens
    crowd.run_until(lambda: crowd.ended)
    seconds, rounds = time.perf_counter() - started, max(1, clocked.rounds - rounds)
    row: dict[str, object] = {
        "seconds": seconds,
        "rounds": rounds,
        "expansions_per_s": (engine.drafters.expansions - expansions) / seconds,
        "tokens_per_s": (figures.tokens - tokens) / seconds,
        "host_us_per_round": 1e6 * (clocked.host_s - host_s) / rounds,
        "overrun_share": overrun_share(rig.settings),
    }
    crowd.run_until(lambda: False)
    return row
