"""A P-EAGLE head (arXiv 2602.01469) as a draft source: an EAGLE-3 head that guesses several positions in one forward.

Below a root come copies of a mask token at consecutive positions, as in PARD. A copy reads a learnt vector instead of
the target's. Nodes other than roots are not expanded: the head was not trained to continue from draft tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.drafter.sources.contract import Block
from ssd_serve.drafter.sources.eagle import load_head_source, require_head
from ssd_serve.drafter.sources.features import FeatureStepSource
from ssd_serve.drafter.sources.loading import LoadedSource, SourceConfig
from ssd_serve.drafter.sources.pard.source import PardSource
from ssd_serve.drafter.sources.registry import RegisteredSource, SourceDescription
from ssd_serve.drafter.sources.rows import StepRows
from ssd_serve.drafter.sources.whole_model import StepSourceArguments
from ssd_serve.kernels.batch import Batch
from ssd_serve.models.heads.config import EagleConfig
from ssd_serve.models.heads.eagle import EagleHead
from ssd_serve.models.heads.load import head_config
from ssd_serve.models.hub import find_model


class PEagleSource(PardSource, FeatureStepSource[Block]):
    """Expands roots of requests with all features received."""

    def __init__(self, arguments: StepSourceArguments, head: EagleHead, positions: int) -> None:
        """A block has `positions` positions."""
        super().__init__(arguments, mask=head.config.mask or 0, positions=positions)
        self._head, self._proposed, self._mask_vector = head, head.proposed, head.mask_vector

    @property
    def _width(self) -> int:
        return self._head.width

    def _vectors(self, features: torch.Tensor) -> torch.Tensor:
        return self._head.fuse(features)

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        return self._head.spread(logits)

    def prepared(self, batch: Batch, groups: Sequence[StepRows]) -> Batch:
        """Add a vector for each row."""
        parts: list[torch.Tensor] = []
        for group in groups:
            held, committed = group.held, len(group.committed)
            parts.append(self._known[group.request].table.part(held.start + len(held.slots) - 1, committed))
            parts.append(self._mask_vector.expand(len(group.rows.tokens) - committed, -1))
        return replace(batch, vectors=torch.cat(parts))


def describe_peagle(config: EngineConfig, folder: Path | None) -> SourceDescription:
    """The target layers that a head reads, and the length of its blocks."""
    own = _config(config, folder)
    return SourceDescription(features=own.features or (), block=_positions(own, config), keeps_tree=False)


def load_peagle(source: SourceConfig) -> LoadedSource:
    """Load a head for the configured target and measure its step."""
    positions = _positions(_config(source.config, source.folder), source.config)
    return load_head_source(
        source, lambda arguments, head: PEagleSource(arguments, head, positions), positions
    )


def _config(config: EngineConfig, folder: Path | None) -> EagleConfig:
    target = find_model(config, config.target, "target")
    return head_config(require_head(folder, config), target, config.eagle_features)


def _positions(own: EagleConfig, config: EngineConfig) -> int:
    return min(own.positions or config.draft_depth, config.draft_depth)


SOURCE = RegisteredSource(load_peagle, describe_peagle)
