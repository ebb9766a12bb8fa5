"""A model as a draft, whole or its first layers: loading with KV slots, and measuring steps."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.errors import PairMismatchError, SettingsError
from ssd_serve.cache.slots import SlotPool
from ssd_serve.drafter.sources.draft_model import MAX_PREFILL_ROWS, ModelSource, prefill_rows_of
from ssd_serve.drafter.sources.loading import (
    LoadedSource,
    SourceConfig,
    TokenizerInfo,
    draft_slots,
    draft_times,
    tokenizer_info,
)
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.hub import model_here
from ssd_serve.models.interface import Model
from ssd_serve.models.load import load_served
from ssd_serve.models.sizes import model_sizes
from ssd_serve.models.text.tokenizer import Tokenizer, common_tokens
from ssd_serve.models.wrapped import MappedModel, wrap_model
from ssd_serve.sampling.noise_rows import NoiseRows, capacity_for
from ssd_serve.sampling.ranking import NativeRanking, trusted_ranking

_LEAST_COMMON = 0.5
StepSourceArguments: TypeAlias = tuple[Model, SlotPool, NoiseRows, int, NativeRanking | None, int]


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded draft model and its number of KV slots."""

    model: Model
    slots: int
    noise: NoiseRows | None = None
    """Shared by drafters of the same model; None: `source` makes its own."""
    native: NativeLibrary | None = None
    prefill_rows: int = MAX_PREFILL_ROWS
    """Prefill tokens of a step at most."""

    def source(self, fan_out: int) -> ModelSource:
        """A source with `fan_out` candidates for each node."""
        return ModelSource(*self.arguments(fan_out))

    def arguments(self, fan_out: int) -> StepSourceArguments:
        """The arguments of a `StepSource`."""
        facts = self.model.facts
        noise = self.noise or NoiseRows(
            facts.vocabulary, capacity_for(facts.vocabulary), facts.device, self.native
        )
        native = trusted_ranking(self.native) if facts.device == "cpu" else None
        return self.model, SlotPool(self.slots), noise, fan_out, native, self.prefill_rows


def load_draft_model(source: SourceConfig) -> LoadedSource:
    """Load the draft model and measure its step."""
    config = source.config
    loaded, slots = load_weights(source)
    model, info = with_target_tokens(config, loaded, Tokenizer(require_folder(source)))
    model = wrap_model(model, "draft", config.model_wrapper)
    seconds, prefill_s_per_token = draft_times(model, source)
    draft = DraftModel(model, slots, native=source.native, prefill_rows=prefill_rows_of(prefill_s_per_token))
    return LoadedSource(
        draft.source(config.draft_fan_out), info, seconds, prefill_s_per_token=prefill_s_per_token
    )


def require_folder(source: SourceConfig) -> Path:
    """The folder of a draft. Raises `SettingsError` if it has none."""
    if source.folder is None:
        raise SettingsError(
            f"{source.config.draft_model} names no model: set SSD_DRAFT to a folder or a hub id"
        )
    return source.folder


def load_weights(source: SourceConfig, more_slots: int = 0) -> tuple[Model, int]:
    """Load the model with KV slots for all requests, and `more_slots`; return it and the number of slots."""
    config, path, layers = source.config, require_folder(source), source.layers
    sizes = model_sizes(
        path,
        device=source.device,
        dtype=config.dtype,
        allow_pickle=config.allow_pickle,
        layers=layers,
        native=source.native,
    )
    slots = draft_slots(config, sizes, source.device) + more_slots
    return load_served(config, path, source.device, slots, source.native, source.log, layers=layers), slots


def with_target_tokens(
    config: EngineConfig, model: Model, own: Tokenizer, extra: int = 0
) -> tuple[Model, TokenizerInfo]:
    """The model, wrapped to translate token ids if its vocabulary differs from the target's.

    A wrapped model reads the id after the target's vocabulary as its own token `extra`. Raises
    `PairMismatchError` if too few tokens are common. Without the target's files nothing is translated.
    """
    facts = model.facts
    own_info = TokenizerInfo(
        own.vocabulary_hash(), facts.vocabulary, facts.context, facts.eos_token_ids, own.to_json
    )
    folder = model_here(config.target, "target") if config.target_is_named else None
    if folder is None:
        return model, own_info
    info = tokenizer_info(folder, facts.context)
    if info.tokenizer == own_info.tokenizer and info.vocabulary >= facts.vocabulary:
        return model, own_info
    tokens = common_tokens(Tokenizer(folder), own, info.vocabulary, facts.vocabulary)
    if tokens.share < _LEAST_COMMON:
        raise PairMismatchError(
            f"the draft model {facts.name} has {tokens.share:.0%} of the target's tokens, and at least "
            f"{_LEAST_COMMON:.0%} are needed: choose a draft model of the same family"
        )
    tokens = replace(tokens, read=np.append(tokens.read, extra))
    return MappedModel(model, tokens, info.ends), info
