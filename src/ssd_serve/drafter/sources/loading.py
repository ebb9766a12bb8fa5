"""The inputs and outputs of loading a draft source, and measurements shared by loaders."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ssd_serve.base.devices import parse_device
from ssd_serve.base.draft_messages import FINAL
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.logs import Logger
from ssd_serve.base.trusted_files import cache_folder
from ssd_serve.drafter.sources.contract import DraftSource
from ssd_serve.drafter.sources.registry import (
    NODE_BY_NODE,
    SourceDescription,
    is_source,
    registered_source,
    self_draft_layers,
)
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.heads.config import check_features
from ssd_serve.models.hub import find_model, model_here
from ssd_serve.models.interface import Model
from ssd_serve.models.memory import available_memory
from ssd_serve.models.parallel import Parallel
from ssd_serve.models.roof import expected_roof, roof_dtype, stored_roof
from ssd_serve.models.sizes import ModelSizes, torch_device
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.models.warmup import measure_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """The argument of a source's `load`."""

    config: EngineConfig
    folder: Path | None
    """The draft's files; None: the source is registered by name and has none."""
    device: str
    native: NativeLibrary | None
    log: Logger
    widths: Sequence[int]
    """Step widths, in nodes, to measure the time of."""
    layers: int | None = None
    """The number of first layers that draft; None: all."""
    description: SourceDescription = NODE_BY_NODE
    """The registered source's description."""


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """The vocabulary and context of a source, compared with the verifier's."""

    tokenizer: str
    """Hash of the vocabulary."""
    vocabulary: int
    context: int
    ends: tuple[int, ...]
    """EOS ids."""
    tokenizer_json: Callable[[], str] | None = None
    """Reads tokenizer.json, which grammars need; None: grammars are not followed."""


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """A source that is ready to draft."""

    source: DraftSource
    tokenizer: TokenizerInfo
    seconds: Mapping[int, float]
    """Step times by width."""
    prefill_s_per_token: float | None = None
    """None: the time of one row of the widest step is used."""
    depth: int | None = None
    """Most tokens below a root, where only the weights tell; None: see `description`."""
    description: SourceDescription = NODE_BY_NODE
    """Set by `load_draft`."""

    @property
    def prefill_s(self) -> float:
        """Seconds of prefill for a token."""
        return _widest_row_s(self.seconds) if self.prefill_s_per_token is None else self.prefill_s_per_token


def draft_features(config: EngineConfig, target: Path) -> tuple[int, ...]:
    """The target layers that the configured drafts read. Raises `CheckpointError` for layers that do not
    exist.

    `SSD_EAGLE_LAYERS` gives the layers of drafts with files on another machine only.
    """
    found: list[int] = []
    for name in config.draft_models:
        if self_draft_layers(name) is not None:
            continue
        folder = None if is_source(name) else model_here(name, "draft")
        if folder is None and not is_source(name):
            found += config.eagle_features or ()
        else:
            found += registered_source(name, folder).describe(config, folder).features
    if found:
        layers = len(load_description(target).sizes(Parallel()).kv)
        check_features([layer for layer in found if layer != FINAL], layers)
    return tuple(dict.fromkeys(found))


def draft_times(model: Model, source: SourceConfig) -> tuple[dict[int, float], float]:
    """Return step times by width, and the prefill time of a token: measured on GPUs, expected on CPUs
    from the products alone."""
    facts, widths = model.facts, source.widths
    if facts.device == "cpu":
        folder = cache_folder(source.config.cache_dir, source.log.warning)
        dtype, cores = roof_dtype(facts.dtype), torch.get_num_threads()
        roof = stored_roof(folder, dtype, cores) or expected_roof(cores, dtype)
        expected = {
            rows: roof.product_s(facts.weight_bytes, rows) + roof.layers_s(facts.layers, rows)
            for rows in (*widths, _ROWS)
        }
        return {rows: expected[rows] for rows in widths}, expected[_ROWS] / _ROWS
    seconds = {rows: min(each) for (rows, _), each in measure_steps(model, widths).items()}
    return seconds, measure_prefill(model, _widest_row_s(seconds))


def _widest_row_s(seconds: Mapping[int, float]) -> float:
    widest = max(seconds)
    return seconds[widest] / widest


def target_tokenizer_info(config: EngineConfig) -> TokenizerInfo:
    """Return the target's vocabulary and context, for sources without a model of their own."""
    return tokenizer_info(find_model(config, config.target, "target"), config.context)


def tokenizer_info(folder: Path, context: int | None) -> TokenizerInfo:
    """Read those of the model in a folder, with at most `context` positions."""
    config = load_description(folder).config
    most = min(context or config.context, config.context)
    tokenizer, ends = Tokenizer(folder), config.eos_token_ids
    return TokenizerInfo(tokenizer.vocabulary_hash(), config.vocabulary, most, ends, tokenizer.to_json)


_USUAL, _FEWEST = 256 << 20, 1024


def draft_slots(config: EngineConfig, sizes: ModelSizes, device: str) -> int:
    """KV slots of a draft: what all requests need, or what fits the memory budget."""
    most = config.max_running * (config.context or sizes.context) + config.tree_nodes
    return min(most, max(_FEWEST, _kv_bytes(config, sizes, device) // sizes.kv_bytes_per_slot))


def _kv_bytes(config: EngineConfig, sizes: ModelSizes, device: str) -> int:
    """The configured bytes, a fixed amount, or a tenth of a GPU without the target, which may still be
    loading."""
    if config.draft_kv_memory_mb is not None:
        return config.draft_kv_memory_mb << 20
    own, target = parse_device(device), parse_device(config.target_device)
    if own.kind == "cpu" or (target.kind == "cuda" and set(own.indices) & set(target.indices)):
        return _USUAL
    return (available_memory(torch_device(device)) - sizes.resident_bytes) // 10


_ROWS, _MOST_S, _TURNS = 256, 0.1, 3
"""Rows of a measured prefill, its longest expected time, and its repetitions; the first one warms up."""


def measure_prefill(model: Model, row_s: float) -> float:
    """Seconds of prefill for a token, in chunks of up to 256 tokens with logits of the last one.

    `row_s` is the time of a row in a smaller forward; slow models get a shorter chunk. Overwrites KV slots,
    so it must run before any request.
    """
    rows = min(_ROWS, max(1, int(_MOST_S / row_s)), model.slots, model.facts.context)
    places = list(range(rows))
    text = RequestRows([1] * rows, places, places, np.arange(0, dtype=np.int32), wanted=[rows - 1])
    batch = build_batch([text])
    taken: list[float] = []
    for _ in range(_TURNS):
        started = time.perf_counter()
        taken.append(model.forward(batch).completion.wait() - started)
    return min(taken[1:]) / rows
