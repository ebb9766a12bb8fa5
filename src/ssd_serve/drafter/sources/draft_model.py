"""A draft model as a draft source: keeps KV by node name, computes missing rows, ranks children.

Knows one model and the requests' committed tokens; not the order of expansion.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import Generic, NamedTuple, TypeVar, cast

import numpy as np
import torch

from ssd_serve.base.errors import DeviceMemoryError
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.cache.node import Node
from ssd_serve.cache.slots import SlotPool
from ssd_serve.drafter.sources.contract import Block, CandidateBatch, Candidates, NodeRequest, Scales
from ssd_serve.drafter.sources.rows import DraftKvState, StepRows, TreeRowBuilder, root_of
from ssd_serve.kernels.batch import Batch, Int32Array, RequestRows, build_batch
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.memory import release_memory, within_memory
from ssd_serve.sampling.grammar import Mask
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.sampling.parameters import is_greedy
from ssd_serve.sampling.processors import apply_masks
from ssd_serve.sampling.ranking import NativeRanking, SamplingKeys, rank_children

R = TypeVar("R", bound=Candidates | Block)
"""The result for a node."""
_PREFILL_TOKENS = 16
"""More missing tokens than a few rounds commit count as a prefill."""
MAX_PREFILL_ROWS = 512
_MIN_PREFILL_ROWS = 64
_PREFILL_STEP_S = 0.03
"""Time of a prefill chunk, so that other drafts do not wait longer."""


def prefill_rows_of(prefill_s_per_token: float) -> int:
    """Prefill tokens of a step: as many as take about 30 ms, between 64 and 512."""
    return min(MAX_PREFILL_ROWS, max(_MIN_PREFILL_ROWS, int(_PREFILL_STEP_S / prefill_s_per_token)))


class RankingInputs(NamedTuple):
    """Inputs of ranking, one entry for each row with logits; `lines` is None if the noise table is too
    small for all."""

    keys: SamplingKeys
    lines: list[int] | None
    scales: list[float]
    allowed: list[Mask | None]
    counts: Sequence[int]
    """Entries of each node."""


class StepSource(ABC, Generic[R]):
    """Expands nodes with one forward of `model`; subclasses rank its logits.

    Invariant: a slot belongs to the pool, to the committed tokens of one request or to one of its nodes.
    """

    _proposed: Int32Array | None = None
    """Ids of the tokens that logits are of; None: the whole vocabulary."""

    def __init__(
        self,
        model: Model,
        pool: SlotPool,
        noise: NoiseRows,
        fan_out: int,
        native: NativeRanking | None = None,
        prefill_rows: int = MAX_PREFILL_ROWS,
    ) -> None:
        """`native` ranks on CPUs; a step has at most `prefill_rows` tokens of prefills."""
        self._native = native
        self._model = model
        self.pool = pool
        self._noise = noise
        self._fan_out = fan_out
        self.held: OrderedDict[int, DraftKvState] = OrderedDict()
        self._prefill_rows = prefill_rows
        self._pending_prefill = set[int]()
        self._is_warmup_step = False

    @property
    def is_warmup_step(self) -> bool:
        return self._is_warmup_step

    @property
    def pending_prefill(self) -> Collection[int]:
        return self._pending_prefill

    def open(self, request: int, tokens: Sequence[int], parameters: SamplingParameters, seed: int) -> None:
        self.close(request)
        greedy = is_greedy(parameters)
        self.held[request] = DraftKvState(
            list(tokens), None if greedy else seed, 0.0 if greedy else parameters.temperature
        )

    def commit(self, request: int, tokens: Sequence[int], path: Sequence[int], kept: Sequence[int]) -> None:
        """KV of accepted nodes becomes committed KV where it follows without a gap."""
        held = self.held[request]
        if len(held.slots) == len(held.tokens):
            for name in path:
                slot = held.nodes.pop(name, None)
                if slot is None:
                    break
                held.slots.extend([slot])
        held.tokens.extend(tokens)
        alive = set(kept)
        self.pool.free([slot for name, slot in held.nodes.items() if name not in alive])
        held.nodes = {name: slot for name, slot in held.nodes.items() if name in alive}

    def close(self, request: int) -> None:
        held = self.held.pop(request, None)
        if held is not None:
            self.pool.free(held.take_slots())

    def expand(self, requests: Sequence[NodeRequest], scales: Sequence[Scales]) -> Sequence[R | None]:
        """Run one forward over the missing rows of all requested nodes."""
        groups = self._groups(requests)
        self._is_warmup_step = False
        if not groups:
            return [None] * len(requests)
        wanted = [index for group in groups for index in group.indices]
        # Before the forward: on ROCm a copy to the device waits for the work started there.
        inputs = self._inputs(groups, requests, scales)
        ranked = self._ranked_or_none(groups, inputs)
        if ranked is None:
            self._pending_prefill.clear()
            release_memory()
            return [None] * len(requests)
        return in_order(ranked, wanted, len(requests))

    def _inputs(
        self, groups: Sequence[StepRows], requests: Sequence[NodeRequest], scales: Sequence[Scales]
    ) -> RankingInputs:
        """The inputs of ranking the logits of all wanted rows."""
        keys, counts = SamplingKeys([], [], []), list[int]()
        own_scales, allowed = list[float](), list[Mask | None]()
        for group in groups:
            rows = sum(group.counts)
            keys.seeds.extend([group.held.seed] * rows)
            keys.temperatures.extend([group.held.temperature] * rows)
            counts.extend(group.counts)
            for index, after, count in zip(group.indices, group.after, group.counts, strict=True):
                levels = scales[index]
                allowed.append(requests[index].allowed)
                keys.positions.append(after)
                own_scales.append(levels[0])
                for level in range(1, count):
                    allowed.append(None)
                    keys.positions.append(after + level)
                    own_scales.append(levels[min(level, len(levels) - 1)])
        return RankingInputs(keys, self._lines(keys, allowed), own_scales, allowed, counts)

    def _groups(self, requests: Sequence[NodeRequest]) -> list[StepRows]:
        """The rows of each request, as far as memory allows.

        A prefill that exceeds this step gets its next chunk and no nodes.
        """
        order: dict[int, list[int]] = {}
        for index, each in enumerate(requests):
            order.setdefault(each.request, []).append(index)
        groups: list[StepRows] = []
        self._pending_prefill.clear()
        left = self._prefill_rows
        for request, indices in order.items():
            self.held.move_to_end(request)
            held = self.held[request]
            missing = len(held.tokens) - len(held.slots)
            if missing > max(left, _PREFILL_TOKENS):
                group = self._group(request, [], [], order, left) if left else None
                if group is not None or not left:  # otherwise memory is short
                    self._pending_prefill.add(request)
            else:
                group = self._group(request, [requests[index].at for index in indices], indices, order)
            if group is not None:
                left -= len(group.committed) if missing > _PREFILL_TOKENS else 0
                groups.append(group)
        return groups

    def _ranked_or_none(self, groups: Sequence[StepRows], inputs: RankingInputs) -> Sequence[R] | None:
        """Results of all groups' nodes; None if the device is out of memory."""
        parts = [group.context for group in groups if group.context is not None]
        parts += [group.rows for group in groups if group.rows.tokens]
        batch = self.prepared(build_batch(parts), groups)
        try:
            result = within_memory(lambda: self._model.forward(batch))
        except DeviceMemoryError:
            for group in groups:
                self.pool.free(group.allocated)
            return None
        for group in groups:
            group.held.slots.extend(group.committed)
            group.held.nodes.update(group.new_nodes)
            self.pool.free(group.temporary)
        result.completion.wait()
        prefilled = max(len(group.committed) for group in groups)
        self._is_warmup_step = result.includes_capture or prefilled > _PREFILL_TOKENS
        self.computed(result, groups)
        if not inputs.scales:
            return []
        try:
            return within_memory(lambda: self._rank(result.logits, inputs))
        except DeviceMemoryError:
            return None

    def prepared(self, batch: Batch, groups: Sequence[StepRows]) -> Batch:
        """Hook: the batch with further inputs of the model."""
        del groups
        return batch

    def computed(self, result: ForwardResult, groups: Sequence[StepRows]) -> None:
        """Hook: the model has computed these rows."""

    def _group(
        self,
        request: int,
        nodes: Sequence[Node],
        indices: Sequence[int],
        busy: Collection[int],
        most: int | None = None,
    ) -> StepRows | None:
        """Rows of one request: missing committed tokens as a causal chunk, then missing nodes, parents first.

        Without nodes, at most `most` tokens. None: memory is short.
        """
        held = self.held[request]
        if len(held.slots) == len(held.tokens) and any(node.parent is None for node in nodes):
            self.pool.free([held.slots.pop()])  # the root's logits are needed again
        # A node may have KV without a result, if memory was short when it was ranked.
        self.pool.free([slot for node in nodes if (slot := held.nodes.pop(node.name, None)) is not None])
        first = held.start + len(held.tokens) - 1 - (root_of(nodes[0]).depth if nodes else 0)
        tree = TreeRowBuilder(held, first, most)
        order = sorted(range(len(nodes)), key=lambda place: nodes[place].depth)  # the rows ascend
        rows = [self._rows_of(tree, nodes[place]) for place in order]
        slots = self._allocate(len(tree.tokens), held.slots.last(), busy)
        if slots is None:
            return None
        part = RequestRows(
            tokens=tree.tokens,
            positions=tree.positions,
            write_slots=slots,
            prefix_slots=held.slots.view(),
            wanted=[row for each in rows for row in each],
            ancestry=tree.ancestry,
            tree_slots=[*slots, *tree.earlier],
            tree_positions=[*tree.positions, *tree.earlier_positions],
        )
        return StepRows(
            request,
            held,
            part,
            new_nodes={name: slots[row] for name, row in tree.missing.items()},
            parents=tree.parents,
            committed=slots[: tree.committed],
            indices=[indices[place] for place in order],
            after=[first + 1 + nodes[place].depth for place in order],
            names=[nodes[place].name for place in order],
            counts=[len(each) for each in rows],
            temporary=[slots[row] for row in tree.copies],
        )

    def _rows_of(self, tree: TreeRowBuilder, node: Node) -> range:
        """Hook: append the rows of a requested node, and return those with logits."""
        row = tree.row_of(node)
        return range(row, row + 1)

    def _lines(self, keys: SamplingKeys, allowed: Sequence[Mask | None]) -> list[int] | None:
        """Prepare the noise of some rows, which `ranked` reads; a few proposed tokens need none."""
        return None if self._ranks_proposed(allowed) else self._noise.lines_of(keys.seeds, keys.positions)

    def _ranks_proposed(self, allowed: Sequence[Mask | None]) -> bool:
        """True if the proposed tokens are ranked alone: masks cover the whole vocabulary."""
        no_masks = all(mask is None for mask in allowed)
        return no_masks and self._native is not None and self._proposed is not None

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Hook: return logits of the whole vocabulary."""
        return logits

    @abstractmethod
    def _rank(self, logits: torch.Tensor, inputs: RankingInputs) -> Sequence[R]:
        """Rank the children of all nodes, from the logits of the wanted rows."""

    def ranked(self, logits: torch.Tensor, inputs: RankingInputs) -> CandidateBatch:
        """Return the best `fan_out` children of each row."""
        keys, scales, native, proposed = inputs.keys, inputs.scales, self._native, self._proposed
        if native is not None and proposed is not None and self._ranks_proposed(inputs.allowed):
            return CandidateBatch(*native.rank_proposed(logits, keys, scales, self._fan_out, proposed))
        masked = apply_masks(self._spread(logits), inputs.allowed)
        ranked = rank_children(masked, keys, self._noise, scales, self._fan_out, self._native, inputs.lines)
        return CandidateBatch(*ranked)

    def _allocate(self, count: int, near: int | None, busy: Collection[int]) -> list[int] | None:
        """Allocate slots, evicting the least recently expanded requests that are not `busy`."""
        while True:
            slots = self.pool.allocate(count, near=near)
            if slots is not None:
                return slots
            idle = [each for number, each in self.held.items() if number not in busy]
            evicted = next((each for each in idle if each.slots or each.nodes), None)
            if evicted is None:
                return None
            self.pool.free(evicted.take_slots())


class ModelSource(StepSource[Candidates]):
    """Expands nodes with one forward, `fan_out` children each."""

    def _rank(self, logits: torch.Tensor, inputs: RankingInputs) -> Sequence[Candidates]:
        return self.ranked(logits, inputs)


def blocks_of(ranked: CandidateBatch, counts: Sequence[int]) -> list[Block]:
    """Blocks of so many consecutive rows each."""
    parts = (ranked.rows(slice(*ends)) for ends in pairwise(accumulate(counts, initial=0)))
    return [Block(part.tokens, part.log_probabilities, part.scores, part.expected_scores) for part in parts]


def in_order(ranked: Sequence[R | None], wanted: list[int], count: int) -> Sequence[R | None]:
    """Results in the order of all `count` nodes; `ranked` are those of the indices `wanted`."""
    if wanted == list(range(count)):
        return ranked
    arrays: object = ranked
    if isinstance(arrays, CandidateBatch) and len(wanted) == count:
        return cast("Sequence[R | None]", arrays.rows(np.argsort(wanted)))
    places = {index: row for row, index in enumerate(wanted)}
    return [ranked[places[index]] if index in places else None for index in range(count)]
