"""Medusa and Hydra heads as draft sources: they read the target's last feature that a request has.

A node g tokens beyond the first one that the feature guesses is drafted by head g. Medusa's heads read no tokens, so
that all later ones join in one block; Hydra's read the tokens between feature and node. Keeps no KV.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from ssd_serve.base.draft_messages import FINAL
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.errors import ProtocolError
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.drafter.sources.contract import Block, CandidateBatch, Candidates, NodeRequest, Scales
from ssd_serve.drafter.sources.draft_model import blocks_of, in_order
from ssd_serve.drafter.sources.eagle import require_head, step_seconds
from ssd_serve.drafter.sources.lm_heads.heads import LmHeads, check_heads, read_heads
from ssd_serve.drafter.sources.loading import LoadedSource, SourceConfig, target_tokenizer_info
from ssd_serve.drafter.sources.registry import RegisteredSource, SourceDescription
from ssd_serve.drafter.sources.whole_model import require_folder
from ssd_serve.models.config import positive_size
from ssd_serve.models.heads.kinds import HeadKind, head_kind
from ssd_serve.models.hub import find_model
from ssd_serve.models.weights.formats import read_config
from ssd_serve.sampling.grammar import Mask
from ssd_serve.sampling.noise_rows import NoiseRows, capacity_for
from ssd_serve.sampling.parameters import is_greedy
from ssd_serve.sampling.processors import apply_masks
from ssd_serve.sampling.ranking import NativeRanking, SamplingKeys, rank_children, trusted_ranking

T = TypeVar("T")
_Key = tuple[int | None, float, int]
"""Seed, temperature and position of a node's first drafted token."""
_KEPT = 64
"""Features of a request that are kept, the latest ones: a round's features come before its tokens."""


@dataclass(slots=True)
class _Known:
    """The tokens of a request, and features [kept, hidden] of positions before `end`."""

    tokens: list[int]
    seed: int | None
    temperature: float
    features: torch.Tensor | None = None
    end: int = 0

    def feature(self) -> tuple[int, torch.Tensor] | None:
        """Return the last position before the root with a feature, and the feature [1, hidden]."""
        position = min(self.end, len(self.tokens) - 1) - 1
        kept = 0 if self.features is None else len(self.features)
        if self.features is None or position < max(0, self.end - kept):
            return None
        return position, self.features[position - self.end :][:1]


@dataclass(slots=True)
class HeadRows(Generic[T]):
    """The rows of a step in the order of its nodes, each of one head, with inputs T and what ranks them."""

    inputs: dict[int, list[tuple[int, T]]] = field(default_factory=dict[int, Any])
    """Rows and their inputs by head."""
    keys: SamplingKeys = field(default_factory=lambda: SamplingKeys([], [], []))
    scales: list[float] = field(default_factory=list[float])
    allowed: list[Mask | None] = field(default_factory=list[Any])
    ready: list[int] = field(default_factory=list[int])
    """Indices of the nodes with rows."""
    counts: list[int] = field(default_factory=list[int])
    """Their rows."""

    def add(
        self, index: int, heads: range, request: NodeRequest, levels: Scales, key: _Key, inputs: T
    ) -> None:
        """Add a node's rows, of consecutive heads."""
        seed, temperature, position = key
        self.ready.append(index)
        self.counts.append(len(heads))
        for level, head in enumerate(heads):
            self.inputs.setdefault(head, []).append((len(self.scales), inputs))
            self.scales.append(levels[min(level, len(levels) - 1)])
            self.allowed.append(None if level else request.allowed)
            self.keys.seeds.append(seed)
            self.keys.positions.append(position + level)
            self.keys.temperatures.append(temperature)

    def logits(self, compute: Callable[[int, Sequence[T]], torch.Tensor]) -> torch.Tensor:
        """Return the logits of all rows, which `compute` gives for one head's inputs."""
        parts: list[torch.Tensor] = []
        order: list[int] = []
        for head, rows in self.inputs.items():
            parts.append(compute(head, [inputs for _, inputs in rows]))
            order.extend([place for place, _ in rows])
        return torch.cat(parts)[np.argsort(order)] if len(parts) > 1 else parts[0]


class LmHeadSource:
    """Expands the nodes that some head reaches."""

    is_warmup_step = False

    def __init__(
        self, heads: LmHeads, noise: NoiseRows, fan_out: int, native: NativeRanking | None = None
    ) -> None:
        """`native` ranks on CPUs."""
        self._heads, self._noise, self._fan_out, self._native = heads, noise, fan_out, native
        self._proposed = None if heads.proposed is None else heads.proposed.to(torch.int32).numpy()
        self._blocks = heads.embedding is None
        self._known: dict[int, _Known] = {}

    def open(self, request: int, tokens: Sequence[int], parameters: SamplingParameters, seed: int) -> None:
        greedy = is_greedy(parameters)
        temperature = 0.0 if greedy else parameters.temperature
        self._known[request] = _Known(list(tokens), None if greedy else seed, temperature)

    def commit(self, request: int, tokens: Sequence[int], path: Sequence[int], kept: Sequence[int]) -> None:
        del path, kept
        self._known[request].tokens.extend(tokens)

    def close(self, request: int) -> None:
        self._known.pop(request, None)

    def read(self, request: int, position: int, features: torch.Tensor) -> None:
        """Take the target's normed last hidden states; see `FeatureSource.read`."""
        if position < 0 or features.shape[1] != self._heads.hidden:
            raise ProtocolError(
                f"features have width {features.shape[1]}, not {self._heads.hidden}, or a negative position"
            )
        known, end = self._known.get(request), position + len(features)
        if known is None:
            return
        if known.features is not None and position == known.end:
            features = torch.cat((known.features, features))
        known.end, known.features = end, features[-_KEPT:].clone()

    def expand(
        self, requests: Sequence[NodeRequest], scales: Sequence[Scales]
    ) -> Sequence[Candidates | Block | None]:
        """Run, for each node, the head that guesses the token after it, and in blocks all later ones."""
        rows = HeadRows[tuple[torch.Tensor, list[int]]]()
        for index, (each, levels) in enumerate(zip(requests, scales, strict=True)):
            known = self._known[each.request]
            if (found := known.feature()) is None:
                continue
            position, feature = found
            between = [*known.tokens[position + 1 :], *each.tokens]
            first, end = len(between) - 1, len(self._heads.heads)
            if heads := range(first, end if self._blocks else min(end, first + 1)):
                key = known.seed, known.temperature, position + 2 + first
                rows.add(index, heads, each, levels, key, (feature, between))
        if not rows.ready:
            return [None] * len(requests)
        ranked = self._rank(rows.logits(self._logits), rows)
        if not self._blocks:
            return in_order(ranked, rows.ready, len(requests))
        return in_order(blocks_of(ranked, rows.counts), rows.ready, len(requests))

    def _logits(self, head: int, inputs: Sequence[tuple[torch.Tensor, list[int]]]) -> torch.Tensor:
        vectors = torch.cat([feature for feature, _ in inputs])
        return self._heads.logits(head, vectors, [tokens for _, tokens in inputs])

    def _rank(self, logits: torch.Tensor, rows: HeadRows[Any]) -> CandidateBatch:
        """Rank the proposed tokens alone where nothing needs the whole vocabulary."""
        keys, scales, proposed = rows.keys, rows.scales, self._proposed
        free = all(mask is None for mask in rows.allowed)
        if self._native is not None and proposed is not None and free:
            return CandidateBatch(*self._native.rank_proposed(logits, keys, scales, self._fan_out, proposed))
        masked = apply_masks(self._heads.spread(logits), rows.allowed)
        return CandidateBatch(*rank_children(masked, keys, self._noise, scales, self._fan_out, self._native))


def describe_heads(config: EngineConfig, folder: Path | None) -> SourceDescription:
    """Medusa's heads draft a whole tree at once, Hydra's node by node."""
    folder = require_head(folder, config)
    kind, raw = head_kind(folder), read_config(folder)
    check_heads(kind, raw)
    if kind is HeadKind.MEDUSA:
        return SourceDescription(features=(FINAL,), block=config.draft_depth, keeps_tree=False)
    depth = positive_size(raw, "hydra_num_heads")
    return SourceDescription(features=(FINAL,), depth=depth, keeps_tree=False)


def load_heads(source: SourceConfig) -> LoadedSource:
    """Load heads for the configured target and measure their step."""
    config, native = source.config, source.native
    heads = read_heads(
        require_folder(source),
        find_model(config, config.target, "target"),
        device=source.device,
        dtype=config.dtype,
        allow_pickle=config.allow_pickle,
        native=native,
    )
    vocabulary, device = heads.vocabulary, heads.device
    noise = NoiseRows(vocabulary, capacity_for(vocabulary), device, native)
    ranking = trusted_ranking(native) if device == "cpu" else None
    made = LmHeadSource(heads, noise, config.draft_fan_out, ranking)
    seconds = {width: step_seconds(made, heads.hidden, width) for width in source.widths}
    info = target_tokenizer_info(config)
    return LoadedSource(made, info, seconds, prefill_s_per_token=0.0, depth=len(heads.heads))


SOURCE = RegisteredSource(load_heads, describe_heads)
