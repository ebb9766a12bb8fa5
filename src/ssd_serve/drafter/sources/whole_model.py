"""A model as a draft, whole or its first layers: loaded with its KV slots, and its steps measured. Knows no
requests."""

from dataclasses import dataclass

from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.errors import PairMismatchError, SettingsError
from ssd_serve.cache.slots import SlotPool
from ssd_serve.drafter.sources.draft_model import ModelSource
from ssd_serve.drafter.sources.loading import (
    LoadedSource,
    SourceConfig,
    TokenizerInfo,
    draft_slots,
    measure_draft,
    tokenizer_info,
)
from ssd_serve.drafter.sources.tree_rows import MOST_TEXT_ROWS, text_rows_of
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.hub import model_here
from ssd_serve.models.interface import Model
from ssd_serve.models.load import load_served
from ssd_serve.models.sizes import model_sizes
from ssd_serve.models.text.tokenizer import Tokenizer, common_tokens
from ssd_serve.models.wrapped import MappedModel, wrap_model
from ssd_serve.sampling.noise_rows import NoiseRows, capacity_for
from ssd_serve.sampling.ranking import trusted_ranking

_LEAST_COMMON = 0.5


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded model that guesses, and the KV slots that it was loaded with. `noise` None: rows of its own;
    drafters of one model may share them. `text_rows`: how many tokens of new texts a step reads at most."""

    model: Model
    slots: int
    noise: NoiseRows | None = None
    native: NativeLibrary | None = None
    text_rows: int = MOST_TEXT_ROWS

    def source(self, fan_out: int) -> ModelSource:
        """The model as a source of `fan_out` candidates a node."""
        facts = self.model.facts
        noise = self.noise or NoiseRows(
            facts.vocabulary, capacity_for(facts.vocabulary), facts.device, self.native
        )
        native = trusted_ranking(self.native) if facts.device == "cpu" else None
        return ModelSource(self.model, SlotPool(self.slots), noise, fan_out, native, self.text_rows)


def load_draft_model(order: SourceConfig) -> LoadedSource:
    """Load the draft model and measure its step."""
    config, path, device = order.config, order.folder, order.device
    if path is None:
        raise SettingsError(f"{config.draft_model} names no model: set SSD_DRAFT to a folder or a hub id")
    sizes = model_sizes(
        path,
        device=device,
        dtype=config.dtype,
        allow_pickle=config.allow_pickle,
        layers=order.layers,
        native=order.native,
    )
    slots = draft_slots(config, sizes, device)
    loaded = load_served(config, path, device, slots, order.native, order.log, layers=order.layers)
    model, texts = _in_targets_tokens(config, loaded, Tokenizer(path))
    model = wrap_model(model, "draft", config.model_wrapper)
    seconds, prefill_s_per_token = measure_draft(model, order.widths)
    draft = DraftModel(model, slots, native=order.native, text_rows=text_rows_of(prefill_s_per_token))
    return LoadedSource(
        draft.source(config.draft_fan_out), texts, seconds, prefill_s_per_token=prefill_s_per_token
    )


def _in_targets_tokens(config: EngineConfig, model: Model, own: Tokenizer) -> tuple[Model, TokenizerInfo]:
    """The model as it is where the target's ids mean the same to it, else one that translates them. Raises
    `PairMismatchError` where too few tokens are common. Without the target's files it speaks its own."""
    facts = model.facts
    own_texts = TokenizerInfo(
        own.vocabulary_hash(), facts.vocabulary, facts.context, facts.eos_token_ids, own.to_json
    )
    folder = model_here(config.target, "target") if config.target_is_named else None
    if folder is None:
        return model, own_texts
    texts = tokenizer_info(folder, facts.context)
    if texts.tokenizer == own_texts.tokenizer and texts.vocabulary >= facts.vocabulary:
        return model, own_texts
    tokens = common_tokens(Tokenizer(folder), own, texts.vocabulary, facts.vocabulary)
    if tokens.share < _LEAST_COMMON:
        raise PairMismatchError(
            f"the draft model {facts.name} has {tokens.share:.0%} of the target's tokens, and at least "
            f"{_LEAST_COMMON:.0%} are needed: choose a draft model of the same family"
        )
    return MappedModel(model, tokens, texts.ends), texts
