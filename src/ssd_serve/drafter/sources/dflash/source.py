"""DFlash, DFlash 2 and DSpark heads as draft sources: a block of tokens in one forward, from the target's features.

The context of a request is a key and a value in each layer for each committed token with features, all but the root.
A block begins at the root. Below a later anchor the tokens down to it replace the first masks, since their features are
not known yet. The block of a head that was trained for the gap begins at the anchor instead. Blocks keep no KV.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch

from ssd_serve.base.engine_config import EngineConfig, Mode
from ssd_serve.base.errors import SettingsError
from ssd_serve.cache.node import Node
from ssd_serve.drafter.sources.contract import Block, CandidateBatch, NodeRequest
from ssd_serve.drafter.sources.dflash.config import DFlashConfig
from ssd_serve.drafter.sources.dflash.load import dflash_config, dflash_sizes
from ssd_serve.drafter.sources.dflash.model import ROWS, DFlashHead, PairScores
from ssd_serve.drafter.sources.draft_model import (
    RankingInputs,
    prefill_rows_of,
)
from ssd_serve.drafter.sources.eagle import require_head, step_seconds
from ssd_serve.drafter.sources.features import FeatureStepSource
from ssd_serve.drafter.sources.loading import LoadedSource, SourceConfig, draft_slots, tokenizer_info
from ssd_serve.drafter.sources.registry import RegisteredSource, SourceDescription
from ssd_serve.drafter.sources.rows import StepRows
from ssd_serve.drafter.sources.whole_model import DraftModel, StepSourceArguments, require_folder
from ssd_serve.kernels.batch import Batch, RequestRows
from ssd_serve.models.hub import find_model
from ssd_serve.models.interface import ForwardResult
from ssd_serve.models.load import load_sized, served_options
from ssd_serve.models.wrapped import wrap_model
from ssd_serve.sampling.noise import Float32Array
from ssd_serve.sampling.noise_rows import NoiseRows, capacity_for

_NOTHING = np.empty(0, np.int32)


class DFlashSource(FeatureStepSource[Block]):
    """Expands anchors of requests with features of all committed tokens before the root."""

    def __init__(self, arguments: StepSourceArguments, head: DFlashHead) -> None:
        super().__init__(*arguments)
        self._head, self._config, self._proposed = head, head.config, head.proposed
        self._rows = torch.empty(0)
        self._anchors = list[int]()

    @property
    def _width(self) -> int:
        return self._head.width

    def _vectors(self, features: torch.Tensor) -> torch.Tensor:
        return self._head.fuse(features)

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        return self._head.spread(logits)

    def _can_grow(self, request: NodeRequest) -> bool:
        """True if the context is complete and a block reaches the node."""
        reached = self._config.gap or len(request.tokens) < self._config.positions
        return reached and super()._can_grow(request)

    def _group(
        self,
        request: int,
        nodes: Sequence[Node],
        indices: Sequence[int],
        busy: Collection[int],
        most: int | None = None,
    ) -> StepRows | None:
        """Context rows without KV, then the block of each node.

        The slot of a token has the KV of the features before it. Positions count from the first of these, since a
        window counts the prefix so and rotations depend on distances alone.
        """
        held, known, block = self.held[request], self._known[request], self._config.block
        done = len(held.slots)
        missing = min(len(held.tokens) - done, len(held.tokens) if most is None else most)
        slots = self._allocate(missing + block * len(nodes), held.slots.last(), busy)
        if slots is None:
            return None
        own, free = slots[:missing], slots[missing:]
        context = RequestRows(
            held.tokens[:missing],
            range(done, done + missing),
            own,
            _NOTHING,
            wanted=(),
            ancestry=[1 << row for row in range(missing)],
        )
        tokens, positions, wanted, counts, after = [list[int]() for _ in range(5)]
        for index, node in enumerate(nodes):
            path = NodeRequest(request, node).tokens
            skipped = len(path) if self._config.gap else 0
            text = [known.committed[-1], *path][skipped:]
            first = block * index + len(text) - (1 if self._config.from_anchor else 0)
            start, end = len(held.tokens) + skipped, block * (index + 1)
            tokens += [*text, *[self._config.mask] * (block - len(text))]
            positions += range(start, start + block)
            wanted += range(first, end)
            counts.append(end - first)
            after.append(len(known.committed) + len(path))
        masks = [((1 << block) - 1) << block * (row // block) for row in range(len(tokens))]
        prefix = np.append(held.slots.view(), np.array(own, np.int32))
        rows = RequestRows(tokens, positions, free, prefix, wanted, masks)
        return StepRows(
            request,
            held,
            rows,
            new_nodes={},
            parents=[],
            committed=own,
            indices=list(indices),
            after=after,
            names=[],
            counts=counts,
            temporary=free,
            context=context if missing else None,
        )

    def prepared(self, batch: Batch, groups: Sequence[StepRows]) -> Batch:
        """Add the vectors of context rows."""
        parts: list[torch.Tensor] = []
        for group in groups:
            if group.context is not None:
                start = group.held.start - 1 + len(group.held.slots)
                parts.append(self._known[group.request].table.part(start, len(group.committed)))
        return replace(batch, vectors=torch.cat(parts)) if parts else batch

    def computed(self, result: ForwardResult, groups: Sequence[StepRows]) -> None:
        """Keep the blocks' rows and the anchors' tokens, which pairs are scored by."""
        if self._head.pairs is None:
            return
        self._rows, self._anchors = result.features.get(ROWS, self._rows), []
        before = 0 if self._config.from_anchor else 1
        for group in groups:
            starts = accumulate(group.counts[:-1], initial=0) if group.counts else ()
            wanted = group.rows.wanted
            self._anchors += [group.rows.tokens[wanted[start] - before] for start in starts]

    @torch.inference_mode()
    def _rank(self, logits: torch.Tensor, inputs: RankingInputs) -> Sequence[Block]:
        starts = [*accumulate(inputs.counts, initial=0)]
        pairs, found = self._head.pairs, None
        if pairs is not None and pairs.whole:
            firsts = torch.tensor(starts[:-1], device=logits.device)
            anchors = torch.tensor(self._anchors, device=logits.device)
            logits[firsts] += pairs.all_after(anchors, self._rows[firsts])
        batch = self.ranked(logits, inputs)
        if pairs is not None:
            found = self._paired(pairs, batch, inputs, starts[:-1])
        return [
            Block(
                *(batch.tokens[first:end], batch.log_probabilities[first:end], batch.scores[first:end]),
                batch.expected_scores[first:end],
                None if found is None else found[first + 1 : end],
            )
            for first, end in pairwise(starts)
        ]

    def _paired(
        self, pairs: PairScores, batch: CandidateBatch, inputs: RankingInputs, firsts: list[int]
    ) -> Float32Array:
        """Return log-probabilities [rows, candidates, candidates] of a row's candidates after those of the row before.

        They share the noise and the probability of the row's candidates. Candidates of first rows are ranked again in
        `batch`, by their scores after the anchor.
        """
        tokens = torch.from_numpy(batch.tokens.astype(np.int64)).to(self._rows.device)
        before = tokens.roll(1, 0)
        before[firsts] = torch.tensor(self._anchors, device=tokens.device)[:, None]
        places = self._head.places_of(tokens)
        added: Float32Array = pairs(before, places, self._rows).cpu().numpy()
        if pairs.whole:
            added[firsts] = 0.0  # the whole vocabulary was ranked with them
        temperatures = np.array([each or 1.0 for each in inputs.keys.temperatures], np.float32)
        scales = np.array(inputs.scales, np.float32)[:, None, None]
        scores = batch.scores[:, None, :] + added / temperatures[:, None, None]
        with np.errstate(invalid="ignore"):
            share = np.logaddexp.reduce(batch.log_probabilities, axis=1)[:, None, None]
            scaled = scores / scales
            found: Float32Array = (
                scaled - np.logaddexp.reduce(scaled, axis=2, keepdims=True) + np.minimum(share, 0)
            )
        if pairs.whole:
            return found
        own, values = scores[firsts, 0], found[firsts, 0]
        order = np.argsort(-own, axis=1, kind="stable")
        batch.expected_scores[firsts] = (np.exp(values - share[firsts, 0]) * own).sum(axis=1)
        batch.tokens[firsts] = np.take_along_axis(batch.tokens[firsts], order, 1)
        batch.scores[firsts] = np.take_along_axis(own, order, 1)
        batch.log_probabilities[firsts] = np.take_along_axis(values, order, 1)
        follows = np.array(inputs.counts) > 1
        seconds = np.array(firsts)[follows] + 1
        found[seconds] = np.take_along_axis(found[seconds], order[follows][:, :, None], 1)
        return found


def describe_dflash(config: EngineConfig, folder: Path | None) -> SourceDescription:
    """The target layers that a head reads. Asynchronous drafting has anchors besides roots if the head says so."""
    own = dflash_config(require_head(folder, config), find_model(config, config.target, "target"))
    if own.ahead and config.mode is Mode.SSD:
        depth = None if own.gap else own.positions
        return SourceDescription(features=own.features, depth=depth, keeps_tree=False)
    block = min(own.positions, config.draft_depth)
    return SourceDescription(features=own.features, block=block, keeps_tree=False)


def load_dflash(source: SourceConfig) -> LoadedSource:
    """Load a head for the configured target and measure its step."""
    config, device, native = source.config, source.device, source.native
    folder, target = require_folder(source), find_model(config, config.target, "target")
    sizes = dflash_sizes(source, folder, target)
    own: DFlashConfig = sizes.description.config
    slots = draft_slots(config, sizes, device) + own.block * config.draft_width
    options = replace(served_options(config, device, slots, native), graphs=False, rounded=True)
    head = load_sized(folder, options, sizes, log=source.log)
    if not isinstance(head, DFlashHead):
        raise SettingsError(f"{folder} is no DFlash head")
    model = wrap_model(head, "draft", config.model_wrapper)
    noise = NoiseRows(own.vocabulary, capacity_for(own.vocabulary), head.facts.device, native)
    draft, fan_out = DraftModel(model, slots, noise, native), config.draft_fan_out
    measured = DFlashSource(draft.arguments(fan_out), head)
    seconds = {width: step_seconds(measured, head.width, width) for width in source.widths}
    prefill_s = seconds[max(seconds)] / (max(seconds) * own.block)
    draft = replace(draft, prefill_rows=prefill_rows_of(prefill_s))
    info = tokenizer_info(target, head.facts.context)
    return LoadedSource(DFlashSource(draft.arguments(fan_out), head), info, seconds, prefill_s)


SOURCE = RegisteredSource(load_dflash, describe_dflash)
