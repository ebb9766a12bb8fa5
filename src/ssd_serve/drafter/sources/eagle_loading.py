"""Loads an EAGLE head as a draft, with its KV slots, and measures its step. Knows no requests."""

from dataclasses import replace

import torch

from ssd_serve.cache.slots import SlotPool
from ssd_serve.drafter.sources.eagle import EagleSource
from ssd_serve.drafter.sources.loading import LoadedSource, SourceOrder, measure_draft, texts_of
from ssd_serve.drafter.sources.memory import draft_slots
from ssd_serve.drafter.sources.tree_rows import text_rows_of
from ssd_serve.base.errors import SettingsError
from ssd_serve.kernels.batch import Batch
from ssd_serve.models.heads.load import head_sizes, load_head
from ssd_serve.models.hub import find_model
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.load import served_options
from ssd_serve.models.wrapped import WrappedModel, wrap_model
from ssd_serve.sampling.noise_rows import NoiseRows, capacity_for
from ssd_serve.sampling.ranking import trusted_ranking


class _WithoutFeatures(WrappedModel):
    """A head whose rows carry nothing: it takes as long."""

    def forward(self, batch: Batch) -> ForwardResult:
        vectors = torch.zeros(batch.rows, self._model.facts.hidden)
        return self._model.forward(replace(batch, vectors=vectors))


def load_eagle(order: SourceOrder) -> LoadedSource:
    """Load the head, for the target that the settings name."""
    settings, folder, device = order.settings, order.folder, order.device
    if folder is None:
        raise SettingsError(f"{settings.draft_model} names no head: set SSD_DRAFT to a folder or a hub id")
    target = find_model(settings, settings.target, "target")
    sizes = head_sizes(
        folder,
        target,
        device=device,
        dtype=settings.dtype,
        features=settings.eagle_features,
        allow_pickle=settings.allow_pickle,
        native=order.native,
    )
    slots = draft_slots(settings, sizes, device)
    wish = replace(served_options(settings, device, slots, order.native), graphs=False)
    head = load_head(folder, wish, sizes, order.log)
    model: Model = wrap_model(head, "draft", settings.model_wrapper)
    seconds, text_s = measure_draft(_WithoutFeatures(model), order.widths)
    facts = head.facts
    noise = NoiseRows(facts.vocabulary, capacity_for(facts.vocabulary), facts.device, order.native)
    ranking = trusted_ranking(order.native) if facts.device == "cpu" else None
    return LoadedSource(
        EagleSource(
            *(head, SlotPool(slots), noise, settings.draft_fan_out, ranking, text_rows_of(text_s)),
            model=model,
        ),
        texts_of(target, facts.context),
        seconds,
        sizes.description.config.features,
        text_s,
    )
