"""The embedded pair on one core, timed by a device table, and prompts that its training never saw."""

from pathlib import Path

import torch

from lab.virtual.rig import DRAFT_SLOTS, SLOTS, TimedPair
from ssd_serve.bench.device_tables import device_table
from ssd_serve.bench.prompts import Prompt, held_out_prompts
from ssd_serve.engine_settings import EMBEDDED
from ssd_serve.kernels.native.library import native_library
from ssd_serve.models.hub import resolve_model
from ssd_serve.models.interface import Model
from ssd_serve.models.load import ModelWish, load_model
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.settings import Settings


def embedded_pair(table: str, features: tuple[int, ...] = ()) -> tuple[TimedPair, list[Prompt]]:
    """Load both models; `features` are layers of the target that a draft reads. One thread: results are then
    the same whatever else the machine does."""
    torch.set_num_threads(1)
    timed = device_table(table)
    target, draft = resolve_model(EMBEDDED, "target"), resolve_model(EMBEDDED, "draft")
    pair = TimedPair(_load(target, SLOTS, features), _load(draft, DRAFT_SLOTS), timed)
    return pair, held_out_prompts(target, Tokenizer(target))


def embedded_draft() -> Model:
    """The draft model once more, for one more drafter."""
    return _load(resolve_model(EMBEDDED, "draft"), DRAFT_SLOTS)


def _load(path: Path, slots: int, features: tuple[int, ...] = ()) -> Model:
    native = native_library(Settings())
    wish = ModelWish(device="cpu", dtype="auto", slots=slots, context=None, native=native, features=features)
    return load_model(path, wish)
