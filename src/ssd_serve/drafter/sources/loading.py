"""What a draft source is loaded for, and what its drafter must know of it once it is.

Knows settings and folders; not how anything is guessed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ssd_serve.base.devices import parse_device
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.logs import Logger
from ssd_serve.drafter.sources.contract import DraftSource
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.hub import find_model
from ssd_serve.models.interface import Model
from ssd_serve.models.memory import available_memory
from ssd_serve.models.sizes import ModelSizes, torch_device
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.models.warmup import measure_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """A source that is to be loaded on `device`. `folder` has the draft's files; None: it is a name that
    needs none. `widths` are numbers of nodes in a step whose times must be known; `layers`: how many of a
    model's layers draft, the first ones, if not all."""

    config: EngineConfig
    folder: Path | None
    device: str
    native: NativeLibrary | None
    log: Logger
    widths: Sequence[int]
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """The texts that a source can draft. The verifier compares them with its own."""

    tokenizer: str
    """Hash of its vocabulary."""
    vocabulary: int
    context: int
    ends: tuple[int, ...]
    """Ids that end a text."""
    spelled: Callable[[], str] | None = None
    """tokenizer.json, where grammars can be followed by it."""


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """A source that is ready. `seconds` are those of a step of each width; `features` are the target's layers
    whose outputs it reads. `prefill_s_per_token` are the seconds of a token of a new text that it reads, without them a
    row's of the widest step."""

    source: DraftSource
    tokenizer: TokenizerInfo
    seconds: Mapping[int, float]
    features: tuple[int, ...] = ()
    prefill_s_per_token: float | None = None

    @property
    def prefill_s(self) -> float:
        """Seconds for which a token of a new text is read, as far as that is known."""
        return _widest_row_s(self.seconds) if self.prefill_s_per_token is None else self.prefill_s_per_token


def measure_draft(model: Model, widths: Sequence[int]) -> tuple[dict[int, float], float]:
    """Seconds of a step of each width, and those for which a token of a new text is read."""
    seconds = {rows: min(each) for (rows, _), each in measure_steps(model, widths).items()}
    return seconds, measure_prefill(model, _widest_row_s(seconds))


def _widest_row_s(seconds: Mapping[int, float]) -> float:
    """Of a step of the most rows, those of one."""
    widest = max(seconds)
    return seconds[widest] / widest


def target_tokenizer_info(config: EngineConfig) -> TokenizerInfo:
    """Those of the target, for sources that have no model of their own."""
    return tokenizer_info(find_model(config, config.target, "target"), config.context)


def tokenizer_info(folder: Path, context: int | None) -> TokenizerInfo:
    """Those of a model in this folder, of at most so many tokens."""
    config = load_description(folder).config
    most = min(context or config.context, config.context)
    tokenizer, ends = Tokenizer(folder), config.eos_token_ids
    return TokenizerInfo(tokenizer.vocabulary_hash(), config.vocabulary, most, ends, tokenizer.to_json)


_USUAL, _FEWEST = 256 << 20, 1024


def draft_slots(config: EngineConfig, sizes: ModelSizes, device: str) -> int:
    """As many as all requests need, or fewer where there is not so much memory for them."""
    most = config.max_running * (config.context or sizes.context) + config.tree_nodes
    return min(most, max(_FEWEST, _kv_bytes(config, sizes, device) // sizes.kv_bytes_per_slot))


def _kv_bytes(config: EngineConfig, sizes: ModelSizes, device: str) -> int:
    """Bytes: what the settings name, or a share of a GPU that has no target, which would be loading now."""
    if config.draft_kv_memory_mb is not None:
        return config.draft_kv_memory_mb << 20
    own, target = parse_device(device), parse_device(config.target_device)
    if own.kind == "cpu" or (target.kind == "cuda" and set(own.indices) & set(target.indices)):
        return _USUAL
    return (available_memory(torch_device(device)) - sizes.resident_bytes) // 10


_ROWS, _MOST_S, _TURNS = 256, 0.1, 3
"""Rows that are read at a time, or fewer that should take so long; the first turn warms up."""


def measure_prefill(model: Model, row_s: float) -> float:
    """Seconds a token of a new text that is read some hundred tokens at a time, which give no logits but the
    last; `row_s` is what a row of a smaller forward takes, for models so slow that fewer are read. Writes
    garbage into KV slots: call it before any request runs."""
    rows = min(_ROWS, max(1, int(_MOST_S / row_s)), model.slots, model.facts.context)
    places = list(range(rows))
    text = RequestRows([1] * rows, places, places, np.arange(0, dtype=np.int32), wanted=[rows - 1])
    batch = build_batch([text])
    taken: list[float] = []
    for _ in range(_TURNS):
        started = time.perf_counter()
        taken.append(model.forward(batch).completion.wait() - started)
    return min(taken[1:]) / rows
