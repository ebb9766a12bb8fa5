"""`python -m lab.invariance`: what SSD_BATCH_INVARIANT costs, a forward with and without, in turn.

Slots lie in order, as in a fresh server, or scattered, as after many requests. Knows models and batches, no
requests; that texts are equal is for `ssd bench lossless` to show.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from ssd_serve.kernels.attention.self_test import TriedRequest, random_batch
from ssd_serve.kernels.batch import Batch
from ssd_serve.kernels.native.library import native_library
from ssd_serve.models.hub import find_model
from ssd_serve.models.interface import Model
from ssd_serve.models.load import load_served
from ssd_serve.models.sizes import torch_device
from ssd_serve.settings import Settings

SHAPES: dict[str, tuple[TriedRequest, ...]] = {
    "1 row after 512": (TriedRequest(512, 1),),
    "8 x 1 row after 512": (TriedRequest(512, 1),) * 8,
    "1 row after 4,096": (TriedRequest(4096, 1),),
    "9 nodes after 512": (TriedRequest(512, 9),),
    "8 x 9 nodes after 512": (TriedRequest(512, 9),) * 8,
    "256 rows of a prompt": (TriedRequest(0, 256, depth=0),),
    "256 rows of a prompt after 1,024": (TriedRequest(1024, 256, depth=0),),
}


@dataclass(frozen=True, slots=True)
class InvariancePlan:
    """What is measured: which shapes, and how often."""

    shapes: tuple[str, ...] = tuple(SHAPES)
    repeats: int = 15


def run_invariance(settings: Settings, plan: InvariancePlan, say: Callable[[str], None]) -> dict[str, object]:
    """`{"results", ...}`: a row for each shape and order of slots, medians in milliseconds.

    Shapes that are longer than the model's context are left out.
    """
    device = settings.target_device or "cpu"
    if torch_device(device) == "cpu":
        torch.set_num_threads(1)
    path = find_model(settings, settings.target, "target")
    native = native_library(settings)
    slots = max(sum(each.prefix + each.rows for each in SHAPES[name]) for name in plan.shapes)
    plain, invariant = (
        load_served(settings, path, device, slots, native, batch_invariant=each) for each in (False, True)
    )
    rows: list[dict[str, object]] = []
    for name in plan.shapes:
        if max(each.prefix + each.rows for each in SHAPES[name]) > plain.facts.context:
            continue
        for scattered in (False, True):
            batch = _batch(SHAPES[name], slots, scattered)
            rows.append({"shape": name, "scattered": scattered, **_compare(plain, invariant, batch, plan)})
            say(f"{name}: {rows[-1]}")
    facts = plain.facts
    return {
        "benchmark": "invariance",
        "model": facts.name,
        "dtype": facts.dtype,
        "device": device,
        "kernels": facts.kernels,
        "attention": [facts.attention, invariant.facts.attention],
        "threads": torch.get_num_threads(),
        "repeats": plan.repeats,
        "results": rows,
    }


def _batch(asked: tuple[TriedRequest, ...], slots: int, scattered: bool) -> Batch:
    """All logits of trees and single rows, and the last one of a prompt."""
    batch = random_batch(random.Random(1), slots, asked, scattered)
    prompt = len(asked) == 1 and asked[0].depth == 0
    return replace(batch, rows_wanted=np.arange(batch.rows - 1 if prompt else 0, batch.rows))


def _compare(plain: Model, invariant: Model, batch: Batch, plan: InvariancePlan) -> dict[str, object]:
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(plan.repeats + 1):  # the first one warms up
        for model, taken in zip((plain, invariant), seconds, strict=True):
            started = time.perf_counter()
            ended = model.forward(batch).completion.wait()
            if turn:
                taken.append(ended - started)
    without, with_it = (1e3 * statistics.median(each) for each in seconds)
    return {
        "plain_ms": round(without, 3),
        "invariant_ms": round(with_it, 3),
        "ratio": round(with_it / without, 3),
    }
