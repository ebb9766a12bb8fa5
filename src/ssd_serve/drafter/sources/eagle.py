"""An EAGLE head as a draft source: drafts from the target's features and then from its own output vectors.

A row is a token and the vector of the position before it. For a committed token the vector is the target's
fused features; for a draft token it is the head's own output at the parent. The KV of an accepted draft token
is therefore not the KV of the committed token, which is computed again with its true vector in the next step.
Knows one head and its vectors; not how they are sent.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.errors import SettingsError
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.drafter.sources.contract import (
    Block,
    CandidateBatch,
    Candidates,
    DraftSource,
    FeatureSource,
    NodeRequest,
)
from ssd_serve.drafter.sources.draft_model import RankingInputs, prefill_rows_of
from ssd_serve.drafter.sources.features import FeatureStepSource
from ssd_serve.drafter.sources.loading import (
    LoadedSource,
    SourceConfig,
    draft_slots,
    draft_times,
    tokenizer_info,
)
from ssd_serve.drafter.sources.registry import RegisteredSource, SourceDescription
from ssd_serve.drafter.sources.rows import StepRows
from ssd_serve.drafter.sources.whole_model import DraftModel, StepSourceArguments
from ssd_serve.kernels.batch import Batch
from ssd_serve.models.heads.eagle import OWN, EagleHead
from ssd_serve.models.heads.load import head_config, head_sizes, load_head
from ssd_serve.models.hub import find_model
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.load import served_options
from ssd_serve.models.wrapped import WrappedModel, wrap_model


class EagleSource(FeatureStepSource[Candidates | Block]):
    """Expands nodes with one forward of a head, for requests with all features received."""

    def __init__(self, arguments: StepSourceArguments, head: EagleHead) -> None:
        super().__init__(*arguments)
        self._head, self._proposed = head, head.proposed
        self._outputs: dict[int, dict[int, torch.Tensor]] = {}
        """The head's own vectors of each request's nodes, by name."""

    @property
    def _width(self) -> int:
        return self._head.width

    def _vectors(self, features: torch.Tensor) -> torch.Tensor:
        return self._head.fuse(features)

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        return self._head.spread(logits)

    def open(self, request: int, tokens: Sequence[int], parameters: SamplingParameters, seed: int) -> None:
        super().open(request, tokens, parameters, seed)
        self._outputs[request] = {}

    def close(self, request: int) -> None:
        super().close(request)
        self._outputs.pop(request, None)

    def commit(self, request: int, tokens: Sequence[int], path: Sequence[int], kept: Sequence[int]) -> None:
        super().commit(request, tokens, path, kept)
        alive, outputs = {*kept, *path[-1:]}, self._outputs[request]
        self._outputs[request] = {name: own for name, own in outputs.items() if name in alive}

    def add(self, request: int, position: int, vectors: torch.Tensor) -> bool:
        gap = super().add(request, position, vectors)
        if gap:
            self._outputs[request].clear()
        return gap

    def prepared(self, batch: Batch, groups: Sequence[StepRows]) -> Batch:
        """Add a vector for each row."""
        parts: list[torch.Tensor] = []
        for group in groups:
            held, known = group.held, self._known[group.request]
            parts.append(known.table.part(held.start + len(held.slots) - 1, len(group.committed)))
            parts += [self._outputs[group.request][parent][None] for parent in group.parents]
        return replace(batch, vectors=torch.cat(parts))

    def computed(self, result: ForwardResult, groups: Sequence[StepRows]) -> None:
        """Keep the head's outputs, the inputs of the nodes' children."""
        own = iter(result.features[OWN])
        for group in groups:
            self._outputs[group.request].update((name, next(own)) for name in group.names)

    def _rank(self, logits: torch.Tensor, inputs: RankingInputs) -> CandidateBatch:
        return self.ranked(logits, inputs)

    def _can_grow(self, request: NodeRequest) -> bool:
        """True if committed tokens have vectors and the node's ancestors have outputs."""
        if not super()._can_grow(request):
            return False
        node, outputs = request.at, self._outputs[request.request]
        while node.parent is not None:
            node = node.parent
            if node.name not in outputs:
                return False
        return True


class _WithZeroFeatures(WrappedModel):
    """Runs a head for measurements, with zeros for features."""

    def forward(self, batch: Batch) -> ForwardResult:
        vectors = torch.zeros(batch.rows, self._model.facts.hidden)
        return self._model.forward(replace(batch, vectors=vectors))


def describe_eagle(config: EngineConfig, folder: Path | None) -> SourceDescription:
    """The target layers that the head was trained on, or those of `SSD_EAGLE_LAYERS`."""
    folder = require_head(folder, config)
    target = find_model(config, config.target, "target")
    return SourceDescription(
        features=head_config(folder, target, config.eagle_features).features or (), keeps_tree=False
    )


def load_eagle(source: SourceConfig) -> LoadedSource:
    """Load a head for the configured target and measure its step."""
    return load_head_source(source, EagleSource)


def load_head_source(
    source: SourceConfig,
    make: Callable[[StepSourceArguments, EagleHead], FeatureStepSource[Any]],
    rows: int = 1,
) -> LoadedSource:
    """Load a head as the source that `make` returns, with `rows` rows for each node of a step."""
    config, device, native = source.config, source.device, source.native
    folder, target = require_head(source.folder, config), find_model(config, config.target, "target")
    sizes = head_sizes(
        folder,
        target,
        device=device,
        dtype=config.dtype,
        features=source.description.features,
        allow_pickle=config.allow_pickle,
        native=native,
    )
    slots = draft_slots(config, sizes, device) + config.draft_width * (rows - 1)
    options = replace(served_options(config, device, slots, native), graphs=False, rounded=True)
    head = load_head(folder, options, sizes, source.log)
    model: Model = wrap_model(head, "draft", config.model_wrapper)
    steps = replace(source, widths=[rows * width for width in source.widths])
    measured, prefill_s_per_token = draft_times(_WithZeroFeatures(model), steps)
    seconds = {width: measured[rows * width] for width in source.widths}
    draft = DraftModel(model, slots, native=native, prefill_rows=prefill_rows_of(prefill_s_per_token))
    made = make(draft.arguments(config.draft_fan_out), head)
    if head.facts.device == "cpu":
        seconds = {width: step_seconds(made, head.width, width) for width in seconds}
    info = tokenizer_info(target, head.facts.context)
    return LoadedSource(made, info, seconds, prefill_s_per_token)


_TOKENS, _TURNS = 4, 4
"""Tokens of a measured request, and repetitions; the first one warms up."""


class _ReadingSource(DraftSource, FeatureSource, Protocol):
    """A source that reads features."""


def step_seconds(source: _ReadingSource, features: int, width: int) -> float:
    """Measure a whole step of `width` roots, as it is served: on CPUs Python takes about as long as the products.

    `features` is the width of the target's features. It must run before any request.
    """
    requests, tokens = range(width), [0] * (_TOKENS + 1)
    nodes = [NodeRequest(request, SpeculationTree(request, width).root) for request in requests]
    taken: list[float] = []
    for request in requests:
        source.open(request, tokens, SamplingParameters(temperature=0.0), 0)
        source.read(request, 0, torch.zeros((_TOKENS, features), dtype=torch.bfloat16))
    for _ in range(_TURNS):
        started = time.perf_counter()
        source.expand(nodes, [(1.0,)] * width)
        taken.append(time.perf_counter() - started)
    for request in requests:
        source.close(request)
    return min(taken[1:])


def require_head(folder: Path | None, config: EngineConfig) -> Path:
    """The folder of a head. Raises `SettingsError` if it has none."""
    if folder is None:
        raise SettingsError(f"{config.draft_model} names no head: set SSD_DRAFT to a folder or a hub id")
    return folder


SOURCE = RegisteredSource(load_eagle, describe_eagle)
