"""Times forwards of well-known models on a GPU: by rows and context, with attention's backends, as captured
graphs and kernel by kernel, beside what the device table says of the same forward.

Weights are random, shapes are the model's own, and every row of logits is wanted, as in a tree. The time of a
forward begins with the host's wish and ends when the host knows that the device has finished; nothing is
chosen from the logits. Run it alone on the machine. Knows no engine.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from lab.forwards.weights import write_random
from ssd_serve.errors import UserError
from ssd_serve.kernels.attention.timing import clock_of
from ssd_serve.kernels.capture import captured_rows
from ssd_serve.models.captured import CapturedModel
from ssd_serve.models.load import load_served
from ssd_serve.models.memory import release_memory
from ssd_serve.models.warmup import measure_steps
from ssd_serve.plan.device_tables import DeviceSheet, device_sheet, sheet_names
from ssd_serve.plan.forwards import Forward, forward_parts
from ssd_serve.plan.known_models import Computing, PlannedModel, planned_model
from ssd_serve.settings import Settings

_COPIED = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardsPlan:
    """What is measured. `device` is torch's name, `sheet` a row of the device table (empty: that of the GPU's
    name), `folder` has room for the largest model's weights."""

    models: Sequence[str]
    device: str = "cuda:0"
    sheet: str = ""
    attention: Sequence[str] = ("auto",)
    graphs: Sequence[bool] = (True,)
    rows: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    contexts: Sequence[int] = (128, 1024, 4096)
    repeats: int = 16
    folder: Path = Path("/dev/shm")


def measure(plan: ForwardsPlan, say: Callable[[str], None]) -> dict[str, object]:
    """A row for each model, backend, way to launch, row count and context."""
    sheet = device_sheet(plan.sheet or sheet_of(torch.cuda.get_device_name(plan.device)))
    say(f"{sheet.name}: copying")
    result: dict[str, object] = {
        "benchmark": "forwards",
        "device": plan.device,
        "sheet": sheet.name,
        "sheet_gb_per_s": sheet.bandwidth_gb_s,
        "copied_gb_per_s": round(_copied(plan.device) / 1e9),
    }
    found: list[dict[str, object]] = []
    for name in plan.models:
        with TemporaryDirectory(prefix="ssd-forwards-", dir=plan.folder) as folder:
            path = Path(folder) / name
            say(f"{name}: writing random weights")
            write_random(name, path, plan.device)
            known = planned_model(name, "target", Computing("cuda", torch.bfloat16), None)
            for backend in plan.attention:
                for graphs in plan.graphs:
                    found += _of_model(plan, sheet, known, path, backend, graphs, say)
    return {**result, "results": found}


def sheet_of(gpu: str) -> str:
    """The row of the device table for a GPU of this name. Raises `UserError` where there is none."""
    name = next((name for name in sheet_names() if name in gpu.lower()), None)
    if name is None:
        raise UserError(f"{gpu} is not in the device table; name a row of it with --sheet")
    return name


def _of_model(
    plan: ForwardsPlan,
    sheet: DeviceSheet,
    known: PlannedModel,
    path: Path,
    backend: str,
    graphs: bool,
    say: Callable[[str], None],
) -> list[dict[str, object]]:
    settings = Settings(tree_decode_backend=backend, graphs=graphs, dtype="bf16")
    slots = 2 * (max(plan.contexts) + max(plan.rows))
    try:
        model = load_served(settings, path, plan.device, slots, None)
    except UserError as error:
        say(f"{known.name}, {backend}: {error}")
        return []
    attention = model.facts.attention
    say(f"{known.name}: {attention}, {'captured' if graphs else 'kernel by kernel'}")
    times = measure_steps(model, plan.rows, plan.contexts, plan.repeats)
    captured = model.row_counts if isinstance(model, CapturedModel) else frozenset[int]()
    del model
    release_memory()
    kind: dict[str, object] = {"model": known.name, "attention": attention}
    rows: list[dict[str, object]] = [
        {
            **kind,
            "captured": captured_rows(count) in captured,
            "rows": count,
            "context": context,
            "ms": round(1e3 * statistics.median(seconds), 3),
            "best_ms": round(1e3 * min(seconds), 3),
            "said_ms": round(1e3 * _said_s(sheet, known, count, context), 3),
        }
        for (count, context), seconds in times.items()
    ]
    for row in rows:
        say(f"  {row['rows']} rows after {row['context']}: {row['ms']} ms, said {row['said_ms']}")
    return rows


def _said_s(sheet: DeviceSheet, known: PlannedModel, rows: int, context: int) -> float:
    """What the table says of it, without the choice among logits."""
    parts = forward_parts(sheet, known, 1, Forward.of_one(rows, context))
    return replace(parts, sampling_s=0.0).seconds


def _copied(device: str) -> float:
    """Bytes a second that the device reads and writes, both counted, in its best copy of some."""
    source = torch.empty(_COPIED, dtype=torch.uint8, device=device).random_()
    into = torch.empty_like(source)
    now = clock_of(torch.device(device))
    times: list[float] = []
    for _ in range(8):
        began = now()
        into.copy_(source)
        times.append(now() - began)
    return 2 * _COPIED / min(times)
