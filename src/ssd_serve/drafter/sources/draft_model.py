"""A draft model as a draft source: keeps KV by node name, computes missing rows, ranks children.

Knows one model and the requests' committed tokens; not the order of expansion.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ssd_serve.base.errors import DeviceMemoryError
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.cache.node import Node
from ssd_serve.cache.slots import SlotPool
from ssd_serve.drafter.sources.contract import CandidateBatch, Candidates, NodeRequest, Scales
from ssd_serve.drafter.sources.tree_rows import (
    MAX_PREFILL_ROWS,
    DraftKvState,
    StepRows,
    TreeRowBuilder,
    root_of,
)
from ssd_serve.kernels.batch import Batch, RequestRows, build_batch
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.memory import release_memory, within_memory
from ssd_serve.sampling.grammar import Mask
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.sampling.parameters import is_greedy
from ssd_serve.sampling.processors import apply_masks
from ssd_serve.sampling.ranking import NativeRanking, SamplingKeys, rank_children

_PREFILL_TOKENS = 16
"""More missing tokens than a few rounds commit count as a prefill."""


class RankingInputs(NamedTuple):
    """Inputs of ranking, one entry for each requested node; `lines` is None if the noise table is too
    small for all."""

    keys: SamplingKeys
    lines: list[int] | None
    scales: list[float]
    allowed: list[Mask | None]


class ModelSource:
    """Expands nodes with one forward of `model`, `fan_out` children each.

    Invariant: a slot belongs to the pool, to the committed tokens of one request or to one of its nodes.
    """

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

    def expand(
        self, requests: Sequence[NodeRequest], scales: Sequence[Scales]
    ) -> Sequence[Candidates | None]:
        """Run one forward over the missing rows of all requested nodes."""
        groups = self._groups(requests)
        self._is_warmup_step = False
        if not groups:
            return [None] * len(requests)
        wanted = [index for _, _, indices in groups for index in indices]
        choices = SamplingKeys([], [], [])
        for held, group, indices in groups:
            choices.seeds.extend([held.seed] * len(indices))
            choices.positions.extend(group.after)
            choices.temperatures.extend([held.temperature] * len(indices))
        # Before the forward: on ROCm a copy to the device waits for the work started there.
        lines = self._noise.lines_of(choices.seeds, choices.positions)
        inputs = RankingInputs(
            choices,
            lines,
            [scales[index][0] for index in wanted],
            [requests[index].allowed for index in wanted],
        )
        ranked = self._ranked_or_none(groups, inputs)
        if ranked is None:
            self._pending_prefill.clear()
            release_memory()
            return [None] * len(requests)
        return _in_order(ranked, wanted, len(requests))

    def _groups(self, requests: Sequence[NodeRequest]) -> list[tuple[DraftKvState, StepRows, list[int]]]:
        """The rows of each request and the indices of its nodes, as far as memory allows.

        A prefill that exceeds this step gets its next chunk and no nodes.
        """
        order: dict[int, list[int]] = {}
        for index, each in enumerate(requests):
            order.setdefault(each.request, []).append(index)
        groups: list[tuple[DraftKvState, StepRows, list[int]]] = []
        self._pending_prefill.clear()
        left = self._prefill_rows
        for request, indices in order.items():
            self.held.move_to_end(request)
            held = self.held[request]
            missing = len(held.tokens) - len(held.slots)
            if missing > max(left, _PREFILL_TOKENS):
                group = self._group(request, held, [], order, left) if left else None
                if group is not None or not left:  # otherwise memory is short
                    self._pending_prefill.add(request)
            else:
                group = self._group(request, held, [requests[index].at for index in indices], order)
            if group is not None:
                left -= len(group.committed) if missing > _PREFILL_TOKENS else 0
                groups.append((held, group, [indices[row] for row in group.order]))
        return groups

    def _ranked_or_none(
        self, groups: Sequence[tuple[DraftKvState, StepRows, list[int]]], inputs: RankingInputs
    ) -> Sequence[Candidates] | None:
        """Candidates of all groups' nodes; None if the device is out of memory."""
        batch = self.prepared(build_batch([group.rows for _, group, _ in groups]), groups)
        try:
            result = within_memory(lambda: self._model.forward(batch))
        except DeviceMemoryError:
            for _, group, _ in groups:
                self.pool.free(group.rows.write_slots)
            return None
        self._keep(groups)
        result.completion.wait()
        prefilled = max(len(group.committed) for _, group, _ in groups)
        self._is_warmup_step = result.includes_capture or prefilled > _PREFILL_TOKENS
        self.computed(result, groups)
        if not inputs.scales:
            return []
        try:
            return within_memory(lambda: self._rank(apply_masks(result.logits, inputs.allowed), inputs))
        except DeviceMemoryError:
            return None

    def prepared(self, batch: Batch, groups: Sequence[tuple[DraftKvState, StepRows, list[int]]]) -> Batch:
        """Hook: the batch with further inputs of the model."""
        del groups
        return batch

    def computed(
        self, result: ForwardResult, groups: Sequence[tuple[DraftKvState, StepRows, list[int]]]
    ) -> None:
        """Hook: the model has computed these rows."""

    def _group(
        self,
        request: int,
        held: DraftKvState,
        nodes: Sequence[Node],
        busy: Collection[int],
        most: int | None = None,
    ) -> StepRows | None:
        """Rows of one request: missing committed tokens as a causal chunk, then missing nodes, parents first.

        Without nodes, at most `most` tokens.
        """
        if len(held.slots) == len(held.tokens) and any(node.parent is None for node in nodes):
            self.pool.free([held.slots.pop()])  # the root's logits are needed again
        first = held.start + len(held.tokens) - 1 - (root_of(nodes[0]).depth if nodes else 0)
        tree = TreeRowBuilder(held, first, most)
        rows = [tree.row_of(node) for node in nodes]
        slots = self._allocate(len(tree.tokens), held.slots.last(), busy)
        if slots is None:
            return None
        order = sorted(range(len(nodes)), key=rows.__getitem__)
        part = RequestRows(
            tokens=tree.tokens,
            positions=tree.positions,
            write_slots=slots,
            prefix_slots=held.slots.view(),
            wanted=[rows[index] for index in order],
            ancestry=tree.ancestry,
            tree_slots=[*slots, *tree.earlier],
            tree_positions=[*tree.positions, *tree.earlier_positions],
        )
        new_nodes = dict(zip(tree.missing, slots[tree.committed :], strict=True))
        after = [first + 1 + nodes[index].depth for index in order]
        names = [nodes[index].name for index in order]
        return StepRows(request, part, new_nodes, tree.parents, slots[: tree.committed], order, after, names)

    def _keep(self, groups: Sequence[tuple[DraftKvState, StepRows, list[int]]]) -> None:
        for held, group, _ in groups:
            held.slots.extend(group.committed)
            held.nodes.update(group.new_nodes)

    def _rank(self, logits: torch.Tensor, inputs: RankingInputs) -> Sequence[Candidates]:
        return CandidateBatch(
            *rank_children(
                logits, inputs.keys, self._noise, inputs.scales, self._fan_out, self._native, inputs.lines
            )
        )

    def _allocate(self, count: int, near: int | None, busy: Collection[int]) -> list[int] | None:
        """Allocate slots, evicting the least recently expanded requests that are not `busy`."""
        while True:
            slots = self.pool.allocate(count, near=near)
            if slots is not None:
                return slots
            idle = next(
                (
                    held
                    for number, held in self.held.items()
                    if number not in busy and (held.slots or held.nodes)
                ),
                None,
            )
            if idle is None:
                return None
            self.pool.free(idle.take_slots())


def _in_order(ranked: Sequence[Candidates], wanted: list[int], count: int) -> Sequence[Candidates | None]:
    """Results in the order of all `count` nodes; `ranked` are those of the indices `wanted`."""
    if wanted == list(range(count)):
        return ranked
    if isinstance(ranked, CandidateBatch) and len(wanted) == count:
        rows = np.argsort(wanted)
        return CandidateBatch(
            ranked.tokens[rows],
            ranked.log_probabilities[rows],
            ranked.scores[rows],
            ranked.expected_scores[rows],
        )
    places = {index: row for row, index in enumerate(wanted)}
    return [ranked[places[index]] if index in places else None for index in range(count)]
