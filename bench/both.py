"""Runs the modes benchmark in the settings that were asked for, and puts one result together."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ssd_serve.bench.devices import Devices
from ssd_serve.bench.machine import hardware, versions
from ssd_serve.bench.modes import CORES, Plan, run_modes
from ssd_serve.bench.prompts import MAX_REPEATED, Chosen, Prompt, held_out_prompts, repeated_share
from ssd_serve.bench.rig import Rig, Way
from ssd_serve.bench.sample import Runner
from ssd_serve.devices import pin
from ssd_serve.models.hub import resolve_model
from ssd_serve.recipes.ballast import add_ballast
from ssd_serve.settings import EMBEDDED, Mode, Settings

_AT_ONCE, _MAX_TRIED = 16, 240
_EMULATED_WIDTH = 12
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
    devices: Devices = CORES,
) -> dict[str, object]:
    """`{"results", "ratios", "notes", "devices", "hardware", "versions"}` over all settings in `which`.

    Prompts are chosen on the CPU, so that they are the same whatever is measured.
    """
    merged: dict[str, object] = {
        "devices": devices.names(),
        "hardware": hardware(),
        "versions": versions(),
    }
    results: list[object] = []
    ratios: list[object] = []
    notes: dict[str, object] = {}
    say("choosing prompts")
    chosen = _choose(temperatures, prompts, tokens, say)
    if devices.target.kind == "cuda":
        pin(devices.target)  # kernels are tried while a model is loaded, on the current GPU
    with tempfile.TemporaryDirectory(prefix="ssd-bench-") as folder:
        for setting in which:
            own = settings.model_copy(update={"mode": Mode.SSD, "prefix_cache": False})
            if setting == "emulated":
                # Wider steps of the embedded draft take this CPU longer than the table's device.
                width = min(_EMULATED_WIDTH, own.draft_width)
                own = own.model_copy(update={"emulate": table, "draft_width": width})
            elif settings.target == EMBEDDED:
                say("writing the ballast pair")
                own = own.model_copy(update=_ballast(Path(folder)))
            plan = Plan(setting, tokens, equal_devices and setting == "real", devices)
            found = run_modes(Rig(own, devices.target.torch_name), plan, chosen, say)
            results += found.results
            ratios += found.ratios
            notes[setting] = found.notes
    return {"results": results, "ratios": ratios, "notes": notes, **merged}


def _choose(
    temperatures: Sequence[float], count: int, tokens: int, say: Callable[[str], None]
) -> dict[float, Chosen]:
    """Prompts whose plain continuation by the embedded target is no loop; the ballast pair's is the same.

    Where too few are found, the least repetitive ones fill up, and the result says how many.
    """
    rig = Rig(Settings(mode=Mode.AR, draft=EMBEDDED, log_level="warning"))
    pool = held_out_prompts(resolve_model(EMBEDDED, "target"), rig.tokenizer)
    engine, runner = rig.engine(Way("ar")), Runner(tokens)
    chosen: dict[float, Chosen] = {}
    for temperature in temperatures:
        tried: list[tuple[float, Prompt]] = []
        fine = 0
        for start in range(0, min(len(pool), _MAX_TRIED), _AT_ONCE):
            some = pool[start : start + _AT_ONCE]
            texts = runner.run_together(engine, some, temperature)
            tried += [(repeated_share(text), prompt) for text, prompt in zip(texts, some, strict=True)]
            fine = sum(share <= MAX_REPEATED for share, _ in tried)
            if fine >= count:
                break
        kept = sorted(tried, key=lambda item: max(item[0], MAX_REPEATED))[:count]
        say(f"temperature {temperature:g}: {fine} of {len(tried)} continuations are no loops")
        loops = sum(share > MAX_REPEATED for share, _ in kept)
        chosen[temperature] = Chosen(tuple(prompt for _, prompt in kept), 1 - fine / len(tried), loops)
    return chosen


def _ballast(folder: Path) -> dict[str, str]:
    """The embedded pair at a larger cost: the settings that name it."""
    target, draft = folder / "target", folder / "draft"
    add_ballast(resolve_model(EMBEDDED, "target"), target, BALLAST_HIDDEN, TARGET_LAYERS)
    add_ballast(resolve_model(EMBEDDED, "draft"), draft, BALLAST_HIDDEN, DRAFT_LAYERS)
    return {"target": str(target), "draft": str(draft)}
