"""A model as a draft, whole or its first layers: loaded with its KV slots, and its steps measured. Knows no
requests."""

from dataclasses import dataclass

from ssd_serve.cache.slots import SlotPool
from ssd_serve.devices import parse_device
from ssd_serve.drafter.sources.draft_model import ModelSource
from ssd_serve.drafter.sources.loading import LoadedSource, SourceOrder, Texts
from ssd_serve.errors import SettingsError
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.interface import Model
from ssd_serve.models.load import load_served
from ssd_serve.models.memory import available_memory
from ssd_serve.models.sizes import ModelSizes, model_sizes, torch_device
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.models.warmup import measure_steps
from ssd_serve.models.wrapped import wrap_model
from ssd_serve.sampling.noise_rows import NoiseRows, capacity_for
from ssd_serve.sampling.ranking import trusted_ranking
from ssd_serve.settings import Settings

_USUAL = 256 << 20


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded model that guesses, and the KV slots that it was loaded with. `noise` None: rows of its own;
    drafters of one model may share them."""

    model: Model
    slots: int
    noise: NoiseRows | None = None
    native: NativeLibrary | None = None

    def source(self, fan_out: int) -> ModelSource:
        """The model as a source of `fan_out` candidates a node."""
        facts = self.model.facts
        noise = self.noise or NoiseRows(
            facts.vocabulary, capacity_for(facts.vocabulary), facts.device, self.native
        )
        native = trusted_ranking(self.native) if facts.device == "cpu" else None
        return ModelSource(self.model, SlotPool(self.slots), noise, fan_out, native)


def load_draft_model(order: SourceOrder) -> LoadedSource:
    """Load the draft model and measure its step."""
    settings, path, device = order.settings, order.folder, order.device
    if path is None:
        raise SettingsError(f"{settings.draft_model} names no model: set SSD_DRAFT to a folder or a hub id")
    sizes = model_sizes(
        path, device=device, dtype=settings.dtype, allow_pickle=settings.allow_pickle, layers=order.layers
    )
    most = settings.max_running * (settings.context or sizes.context) + settings.tree_nodes
    slots = min(most, max(1024, _kv_bytes(settings, sizes, device) // sizes.kv_bytes_per_slot))
    loaded = load_served(settings, path, device, slots, order.native, order.log, layers=order.layers)
    model = wrap_model(loaded, "draft", settings.model_wrapper)
    timings = measure_steps(model, order.widths)
    facts = model.facts
    return LoadedSource(
        DraftModel(model, slots, native=order.native).source(settings.draft_fan_out),
        Texts(Tokenizer(path).vocabulary_hash(), facts.vocabulary, facts.context, facts.eos_token_ids),
        {rows: min(each) for (rows, _), each in timings.items()},
    )


def _kv_bytes(settings: Settings, sizes: ModelSizes, device: str) -> int:
    """Bytes: what the settings name, or a share of a GPU that has no target, which would be loading now."""
    if settings.draft_kv_memory_mb is not None:
        return settings.draft_kv_memory_mb << 20
    own, target = parse_device(device), parse_device(settings.target_device or "cpu")
    if own.kind == "cpu" or (target.kind == "cuda" and set(own.indices) & set(target.indices)):
        return _USUAL
    return (available_memory(torch_device(device)) - sizes.resident_bytes) // 10
