"""Runs the modes benchmark in the settings that were asked for, and puts one result together."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ssd_serve.bench.devices import Devices
from ssd_serve.bench.emulated import emulating
from ssd_serve.bench.modes import CORES, Plan, run_modes
from ssd_serve.bench.rig import Rig
from ssd_serve.bench.workload import ballast_pair, choose_prompts
from ssd_serve.devices import pin
from ssd_serve.settings import EMBEDDED, Mode, Settings

_EMULATED_WIDTH = 12


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
    """`{"results", "ratios", "notes", "devices"}` over all settings in `which`.

    Prompts are chosen on the CPU, so that they are the same whatever is measured.
    """
    results: list[object] = []
    ratios: list[object] = []
    notes: dict[str, object] = {}
    say("choosing prompts")
    chosen = choose_prompts(temperatures, prompts, tokens, say)
    if devices.target.kind == "cuda":
        pin(devices.target)  # kernels are tried while a model is loaded, on the current GPU
    with tempfile.TemporaryDirectory(prefix="ssd-bench-") as folder:
        for setting in which:
            own = settings.model_copy(update={"mode": Mode.SSD, "prefix_cache": False})
            if setting == "emulated":
                # Wider steps of the embedded draft take this CPU longer than the table's device.
                width = min(_EMULATED_WIDTH, own.draft_width)
                wrapper = emulating(table, Path(folder))
                own = own.model_copy(update={"model_wrapper": wrapper, "draft_width": width})
            elif settings.target == EMBEDDED:
                say("writing the ballast pair")
                own = own.model_copy(update=ballast_pair(Path(folder)))
            plan = Plan(setting, tokens, equal_devices and setting == "real", devices)
            found = run_modes(Rig(own, devices.target.torch_name), plan, chosen, say)
            results += found.results
            ratios += found.ratios
            notes[setting] = found.notes
    return {"results": results, "ratios": ratios, "notes": notes, "devices": devices.names()}
