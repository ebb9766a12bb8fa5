"""An EAGLE head as a draft source: drafts from the target's features and then from its own output vectors.

A row is a token and the vector of the position before it. For a committed token the vector is the target's
fused features; for a draft token it is the head's own output at the parent. The KV of an accepted draft token
is therefore not the KV of the committed token, which is computed again with its true vector in the next step.
Knows one head and its vectors; not how they are sent.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch

from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.errors import ProtocolError, SettingsError
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.cache.slots import SlotPool
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.cache.vectors import VectorTable
from ssd_serve.drafter.sources.contract import (
    Block,
    CandidateBatch,
    Candidates,
    DraftSource,
    FeatureSource,
    NodeRequest,
    Scales,
)
from ssd_serve.drafter.sources.draft_model import (
    MAX_PREFILL_ROWS,
    RankingInputs,
    StepSource,
    in_order,
    prefill_rows_of,
)
from ssd_serve.drafter.sources.loading import (
    LoadedSource,
    SourceConfig,
    draft_slots,
    draft_times,
    tokenizer_info,
)
from ssd_serve.drafter.sources.registry import RegisteredSource, SourceDescription
from ssd_serve.drafter.sources.rows import DraftKvState, StepRows
from ssd_serve.kernels.batch import Batch
from ssd_serve.models.heads.eagle import OWN, EagleHead
from ssd_serve.models.heads.load import head_config, head_sizes, load_head
from ssd_serve.models.hub import find_model
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.load import served_options
from ssd_serve.models.wrapped import WrappedModel, wrap_model
from ssd_serve.sampling.grammar import Mask
from ssd_serve.sampling.noise_rows import NoiseRows, capacity_for
from ssd_serve.sampling.ranking import NativeRanking, SamplingKeys, trusted_ranking


@dataclass(slots=True)
class TargetVectors:
    """The committed tokens of a request, and vectors of the target: a token's row reads that of the position before."""

    committed: list[int]
    table: VectorTable = field(default_factory=VectorTable)

    def add(self, held: DraftKvState, pool: SlotPool, position: int, vectors: torch.Tensor) -> bool:
        """Add vectors [positions, hidden] from `position` on; after a gap, forget all earlier ones and return True."""
        gap = position != self.table.end or not len(self.table)
        if gap:
            pool.free(held.take_slots())
            held.start, held.tokens = position + 1, []
            self.table.begin(position)
        self.table.extend(vectors)
        self.queue(held)
        return gap

    def queue(self, held: DraftKvState) -> None:
        """Queue committed tokens that follow a position with a vector."""
        end = min(len(self.committed), self.table.end + 1) if len(self.table) else 0
        held.tokens.extend(self.committed[held.start + len(held.tokens) : end])

    def complete(self, held: DraftKvState) -> bool:
        """True if all committed tokens, after a gap all since, are queued."""
        return bool(held.tokens) and held.start + len(held.tokens) == len(self.committed)


@dataclass(slots=True)
class _Inputs(TargetVectors):
    """Inputs of one request."""

    outputs: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])


class EagleSource(StepSource[Candidates | Block]):
    """Expands nodes with one forward of a head, for requests with all features received."""

    def __init__(
        self,
        head: EagleHead,
        pool: SlotPool,
        noise: NoiseRows,
        fan_out: int,
        native: NativeRanking | None = None,
        prefill_rows: int = MAX_PREFILL_ROWS,
        *,
        model: Model | None = None,
    ) -> None:
        """`model` runs the head's forwards (default: the head itself)."""
        super().__init__(model or head, pool, noise, fan_out, native, prefill_rows)
        self._head = head
        self._known: dict[int, _Inputs] = {}

    def open(self, request: int, tokens: Sequence[int], parameters: SamplingParameters, seed: int) -> None:
        super().open(request, (), parameters, seed)
        self._known[request] = _Inputs(list(tokens))

    def close(self, request: int) -> None:
        super().close(request)
        self._known.pop(request, None)

    def commit(self, request: int, tokens: Sequence[int], path: Sequence[int], kept: Sequence[int]) -> None:
        """Accepted nodes become committed tokens, which are computed again with their features."""
        held, known = self.held[request], self._known[request]
        self.pool.free([slot for name in path if (slot := held.nodes.pop(name, None)) is not None])
        super().commit(request, (), (), kept)
        alive = {*kept, *path[-1:]}
        known.outputs = {name: own for name, own in known.outputs.items() if name in alive}
        known.committed.extend(tokens)
        known.queue(held)

    def read(self, request: int, position: int, features: torch.Tensor) -> None:
        if position < 0 or features.shape[1] != self._head.width:
            raise ProtocolError(
                f"features have width {features.shape[1]}, not {self._head.width}, or a negative position"
            )
        self.add(request, position, self._head.fuse(features))

    def add(self, request: int, position: int, vectors: torch.Tensor) -> None:
        """Take fused features [positions, hidden] of committed tokens; after a gap, forget all earlier
        ones."""
        known = self._known.get(request)
        if known is None:
            return
        if known.add(self.held[request], self.pool, position, vectors):
            known.outputs.clear()

    def expand(
        self, requests: Sequence[NodeRequest], scales: Sequence[Scales]
    ) -> Sequence[Candidates | Block | None]:
        """Run one forward for the nodes with complete inputs."""
        ready = [index for index, each in enumerate(requests) if self._can_grow(each)]
        found = super().expand([requests[index] for index in ready], [scales[index] for index in ready])
        return in_order(found, ready, len(requests))

    def prepared(self, batch: Batch, groups: Sequence[StepRows]) -> Batch:
        """Add a vector for each row."""
        parts: list[torch.Tensor] = []
        for group in groups:
            held, known = group.held, self._known[group.request]
            parts.append(known.table.part(held.start + len(held.slots) - 1, len(group.committed)))
            parts += [known.outputs[parent][None] for parent in group.parents]
        return replace(batch, vectors=torch.cat(parts))

    def computed(self, result: ForwardResult, groups: Sequence[StepRows]) -> None:
        """Keep the head's outputs, the inputs of the nodes' children."""
        own = iter(result.features[OWN])
        for group in groups:
            self._known[group.request].outputs.update((name, next(own)) for name in group.names)

    def _lines(self, keys: SamplingKeys, allowed: Sequence[Mask | None]) -> list[int] | None:
        return None if self._ranks_proposed(allowed) else super()._lines(keys, allowed)

    def _rank(self, logits: torch.Tensor, inputs: RankingInputs) -> CandidateBatch:
        """Rank the proposed tokens alone where nothing needs the whole vocabulary."""
        native, proposed = self._native, self._head.proposed
        if native is None or proposed is None or not self._ranks_proposed(inputs.allowed):
            return self.ranked(self._head.spread(logits), inputs)
        ranked = native.rank_proposed(logits, inputs.keys, inputs.scales, self._fan_out, proposed)
        return CandidateBatch(*ranked)

    def _ranks_proposed(self, allowed: Sequence[Mask | None]) -> bool:
        """Masks cover the vocabulary."""
        no_masks = all(mask is None for mask in allowed)
        return no_masks and self._native is not None and self._head.proposed is not None

    def _can_grow(self, request: NodeRequest) -> bool:
        """True if committed tokens have features and the node's ancestors have outputs."""
        held, known = self.held[request.request], self._known[request.request]
        if not known.complete(held):
            return False
        node = request.at
        while node.parent is not None:
            node = node.parent
            if node.name not in known.outputs:
                return False
        return True


class _WithZeroFeatures(WrappedModel):
    """Runs a head for measurements, with zeros for features."""

    def forward(self, batch: Batch) -> ForwardResult:
        vectors = torch.zeros(batch.rows, self._model.facts.hidden)
        return self._model.forward(replace(batch, vectors=vectors))


def describe_eagle(config: EngineConfig, folder: Path | None) -> SourceDescription:
    """The target layers that the head was trained on, or those of `SSD_EAGLE_LAYERS`."""
    folder = _require(folder, config)
    target = find_model(config, config.target, "target")
    return SourceDescription(
        features=head_config(folder, target, config.eagle_features).features or (), keeps_tree=False
    )


def load_eagle(source: SourceConfig) -> LoadedSource:
    """Load a head for the configured target and measure its step."""
    return load_head_source(source, EagleSource)


def load_head_source(source: SourceConfig, kind: type[EagleSource]) -> LoadedSource:
    """Load a head as a source of this class."""
    config, device = source.config, source.device
    folder, target = _require(source.folder, config), find_model(config, config.target, "target")
    sizes = head_sizes(
        folder,
        target,
        device=device,
        dtype=config.dtype,
        features=source.description.features,
        allow_pickle=config.allow_pickle,
        native=source.native,
    )
    slots = draft_slots(config, sizes, device)
    options = replace(served_options(config, device, slots, source.native), graphs=False, rounded=True)
    head = load_head(folder, options, sizes, source.log)
    model: Model = wrap_model(head, "draft", config.model_wrapper)
    seconds, prefill_s_per_token = draft_times(_WithZeroFeatures(model), source)
    facts = head.facts
    noise = NoiseRows(facts.vocabulary, capacity_for(facts.vocabulary), facts.device, source.native)
    ranking = trusted_ranking(source.native) if facts.device == "cpu" else None
    prefill_rows = prefill_rows_of(prefill_s_per_token)
    made = kind(*(head, SlotPool(slots), noise, config.draft_fan_out, ranking, prefill_rows), model=model)
    if facts.device == "cpu":
        seconds = {width: step_seconds(made, head.width, width) for width in seconds}
    info = tokenizer_info(target, facts.context)
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


def _require(folder: Path | None, config: EngineConfig) -> Path:
    if folder is None:
        raise SettingsError(f"{config.draft_model} names no head: set SSD_DRAFT to a folder or a hub id")
    return folder


SOURCE = RegisteredSource(load_eagle, describe_eagle)
