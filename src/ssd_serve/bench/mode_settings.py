"""Runs the modes benchmark in the settings that were asked for, and puts one result together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ssd_serve.base.devices import pin
from ssd_serve.base.engine_settings import EMBEDDED, Mode
from ssd_serve.base.settings import Settings
from ssd_serve.bench.devices import Devices
from ssd_serve.bench.emulated import emulating
from ssd_serve.bench.journal import Journal, TimeGiven, name_of, read_kept, work_folder, write_kept
from ssd_serve.bench.kept_stage import KeptStage
from ssd_serve.bench.modes import run_modes
from ssd_serve.bench.modes_result import ModesRow
from ssd_serve.bench.prompts import Chosen
from ssd_serve.bench.rig import Rig
from ssd_serve.bench.stage import RigStage
from ssd_serve.bench.timed_request import TimedRequest
from ssd_serve.bench.workload import ballast_pair, choose_prompts

_EMULATED_WIDTH = 12
TUNING_PROMPTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ModesPlan:
    """What to run: `settings` are real, emulated or both; `file` has the prompts, None: held-out files;
    `chat` asks them by the model's template, None: where they are questions. Runs of the same `code` are kept
    in the folder `work` for later sittings, each at most so many `minutes` long."""

    settings: Sequence[str]
    temperatures: Sequence[float]
    prompts: int
    table: str
    devices: Devices
    file: Path | None = None
    chat: bool | None = None
    work: Path | None = None
    minutes: float | None = None
    code: str = ""


def run_settings(settings: Settings, plan: ModesPlan, say: Callable[[str], None]) -> dict[str, object]:
    """The fields of `modes_result.ModesResult`."""
    devices = plan.devices
    where = devices.target if devices.on_gpu and settings.target != EMBEDDED else None
    if devices.target.kind == "cuda":
        pin(devices.target)  # kernels are tried while a model is loaded, on the current GPU
    rows: list[ModesRow] = []
    notes: dict[str, dict[str, object]] = {}
    pairs: dict[str, str] = {}
    with work_folder(plan.work) as folder:
        given = TimeGiven(plan.minutes)
        asked = replace(plan, settings=(), work=None, minutes=None)
        subject = name_of(f"{asked} {settings.model_dump_json()}")
        for setting in plan.settings:
            journal = Journal(folder / f"runs-{setting}.jsonl", subject, TimedRequest)
            if journal.earlier:
                say(f"{setting}: {journal.earlier} runs are known from before")
            own = settings.model_copy(update={"mode": Mode.SSD, "prefix_cache": False})
            pairs[setting] = _pair(settings)
            if setting == "emulated":
                # Wider steps of the embedded draft take this CPU longer than the table's device.
                width = min(_EMULATED_WIDTH, own.draft_width)
                wrapper = emulating(plan.table, folder)
                own = own.model_copy(update={"model_wrapper": wrapper, "draft_width": width})
            elif settings.target == EMBEDDED:
                say("writing the ballast pair")
                own = own.model_copy(update=ballast_pair(folder))
                pairs[setting] += " with ballast (the same function at a larger cost)"
            say(f"{setting}: choosing prompts")
            texts = folder / f"prompts-{setting}.json"
            chosen = read_kept(texts, dict[float, Chosen])
            if chosen is None:
                chosen = choose_prompts(
                    own.model_copy(update={"model_wrapper": None}),
                    plan.temperatures,
                    plan.prompts,
                    say,
                    tuning=TUNING_PROMPTS,
                    file=plan.file,
                    chat=plan.chat,
                    device="cpu" if where is None else where.torch_name,
                )
                write_kept(texts, chosen)
            stage = RigStage(Rig(own, devices.target.torch_name), setting, devices)
            with stage.drafting():
                rows += run_modes(KeptStage(stage, journal, given), chosen, say)
                left_out = {f"{temperature:g}": found.left_out for temperature, found in chosen.items()}
                notes[setting] = {"left_out": left_out, **stage.overruns()}
                if journal.earlier:
                    notes[setting]["earlier_share"] = round(journal.earlier / journal.answers, 3)
    return {
        "benchmark": "modes",
        "prompts": "places in held-out files" if plan.file is None else plan.file.name,
        "results": msgspec.to_builtins(rows),
        "pairs": pairs,
        "notes": notes,
    }


def _pair(settings: Settings) -> str:
    """For people: names without the folders they are in."""
    if settings.target == EMBEDDED:
        return "the embedded pair"
    return " with ".join(Path(name).name for name in (settings.target, *settings.draft_models))
