"""Runs the modes benchmark in the settings that were asked for, and puts one result together."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ssd_serve.bench.machine import hardware, versions
from ssd_serve.bench.modes import Plan, run_modes
from ssd_serve.bench.prompts import held_out_prompts
from ssd_serve.bench.rig import Rig
from ssd_serve.models.hub import resolve_model
from ssd_serve.models.tokenizer import Tokenizer
from ssd_serve.recipes.ballast import add_ballast
from ssd_serve.settings import EMBEDDED, Mode, Settings

BALLAST_HIDDEN, TARGET_LAYERS, DRAFT_LAYERS = 1024, 16, 2


def run_both_settings(
    settings: Settings,
    *,
    which: Sequence[str],
    temperatures: tuple[float, ...],
    prompts: int,
    tokens: int,
    table: str,
    equal_devices: bool,
    say: Callable[[str], None],
) -> dict[str, object]:
    """`{"results", "ratios", "notes", "hardware", "versions"}` over all settings in `which`."""
    merged: dict[str, object] = {"hardware": hardware(), "versions": versions()}
    results: list[object] = []
    ratios: list[object] = []
    notes: dict[str, object] = {}
    target = resolve_model(EMBEDDED, "target")
    pool = held_out_prompts(target, Tokenizer(target))
    with tempfile.TemporaryDirectory(prefix="ssd-bench-") as folder:
        for setting in which:
            chosen = settings.model_copy(update={"mode": Mode.SSD, "prefix_cache": False})
            if setting == "emulated":
                chosen = chosen.model_copy(update={"emulate": table})
            elif settings.target == EMBEDDED:
                say("writing the ballast pair")
                chosen = chosen.model_copy(update=_ballast(Path(folder)))
            plan = Plan(setting, temperatures, prompts, tokens, equal_devices and setting == "real")
            found = run_modes(Rig(chosen), plan, pool, say)
            results += found.results
            ratios += found.ratios
            notes[setting] = found.notes
    return {"results": results, "ratios": ratios, "notes": notes, **merged}


def _ballast(folder: Path) -> dict[str, str]:
    """The embedded pair at a larger cost: the settings that name it."""
    target, draft = folder / "target", folder / "draft"
    add_ballast(resolve_model(EMBEDDED, "target"), target, BALLAST_HIDDEN, TARGET_LAYERS)
    add_ballast(resolve_model(EMBEDDED, "draft"), draft, BALLAST_HIDDEN, DRAFT_LAYERS)
    return {"target": str(target), "draft": str(draft)}
