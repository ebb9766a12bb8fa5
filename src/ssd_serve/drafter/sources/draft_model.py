"""A draft model as a draft source: keeps its KV by node name, feeds what is missing, ranks children.

Knows one model and the requests' committed tokens; it does not decide what is expanded and sees no sockets.
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
from ssd_serve.drafter.sources.contract import CandidateBatch, Candidates, NodeRequest
from ssd_serve.drafter.sources.tree_rows import (
    MOST_TEXT_ROWS,
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

_TOKENS_OF_ROUNDS = 16
"""Who has more tokens of a request to read than a few rounds commit reads its prompt, or was not asked for
long."""


class RankingInputs(NamedTuple):
    """How the rows of a step are ranked, where their noise lies, if all of it fits, and which tokens may
    follow, where that is known."""

    keys: SamplingKeys
    lines: list[int] | None
    scales: list[float]
    allowed: list[Mask | None]


class ModelSource:
    """Expands nodes with one forward of `model`; `fan_out` children each."""

    def __init__(
        self,
        model: Model,
        pool: SlotPool,
        noise: NoiseRows,
        fan_out: int,
        native: NativeRanking | None = None,
        text_rows: int = MOST_TEXT_ROWS,
    ) -> None:
        """`native` ranks on CPUs. A step reads at most `text_rows` tokens of new texts."""
        self._native = native
        self._model = model
        self.pool = pool
        self._noise = noise
        self._fan_out = fan_out
        self.held: OrderedDict[int, DraftKvState] = OrderedDict()
        self._text_rows = text_rows
        self._unread = set[int]()
        self._exceptional_step = False

    @property
    def is_warmup_step(self) -> bool:
        return self._exceptional_step

    @property
    def unread(self) -> Collection[int]:
        return self._unread

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
            self.pool.free(held.all_slots())

    def expand(self, picks: Sequence[NodeRequest], scales: Sequence[float]) -> Sequence[Candidates | None]:
        """One forward over the missing rows of all picks."""
        groups = self._groups(picks)
        self._exceptional_step = False
        if not groups:
            return [None] * len(picks)
        wanted = [index for _, _, indices in groups for index in indices]
        choices = SamplingKeys([], [], [])
        for held, group, indices in groups:
            choices.seeds.extend([held.seed] * len(indices))
            choices.positions.extend(group.after)
            choices.temperatures.extend([held.temperature] * len(indices))
        # Before the forward: on ROCm a copy to the device waits for what was started there.
        lines = self._noise.lines_of(choices.seeds, choices.positions)
        wish = RankingInputs(
            choices,
            lines,
            [scales[index] for index in wanted],
            [picks[index].allowed for index in wanted],
        )
        ranked = self._ranked_or_none(groups, wish)
        if ranked is None:
            self._unread.clear()
            release_memory()
            return [None] * len(picks)
        return _in_order(ranked, wanted, len(picks))

    def _groups(self, picks: Sequence[NodeRequest]) -> list[tuple[DraftKvState, StepRows, list[int]]]:
        """The rows of each request, and which picks they are for, as far as memory allows; of texts too long
        for one step, the next part."""
        order: dict[int, list[int]] = {}
        for index, pick in enumerate(picks):
            order.setdefault(pick.request, []).append(index)
        groups: list[tuple[DraftKvState, StepRows, list[int]]] = []
        self._unread.clear()
        left = self._text_rows
        for request, indices in order.items():
            self.held.move_to_end(request)
            held = self.held[request]
            missing = len(held.tokens) - len(held.slots)
            if missing > max(left, _TOKENS_OF_ROUNDS):
                group = self._group(request, held, [], order, left) if left else None
                if group is not None or not left:  # else there is no memory for it
                    self._unread.add(request)
            else:
                group = self._group(request, held, [picks[index].at for index in indices], order)
            if group is not None:
                left -= len(group.fed) if missing > _TOKENS_OF_ROUNDS else 0
                groups.append((held, group, [indices[place] for place in group.order]))
        return groups

    def _ranked_or_none(
        self, groups: Sequence[tuple[DraftKvState, StepRows, list[int]]], wish: RankingInputs
    ) -> Sequence[Candidates] | None:
        """The candidates of all groups' picks; None where the device has too little memory for them."""
        batch = self.prepared(build_batch([group.rows for _, group, _ in groups]), groups)
        try:
            result = within_memory(lambda: self._model.forward(batch))
        except DeviceMemoryError:
            for _, group, _ in groups:
                self.pool.free(group.rows.write_slots)
            return None
        self._keep(groups)
        result.completion.wait()
        read = max(len(group.fed) for _, group, _ in groups)
        self._exceptional_step = result.includes_capture or read > _TOKENS_OF_ROUNDS
        self.computed(result, groups)
        if not wish.scales:
            return []
        try:
            return within_memory(lambda: self._rank(apply_masks(result.logits, wish.allowed), wish))
        except DeviceMemoryError:
            return None

    def prepared(self, batch: Batch, groups: Sequence[tuple[DraftKvState, StepRows, list[int]]]) -> Batch:
        """The batch as the model wants it."""
        del groups
        return batch

    def computed(
        self, result: ForwardResult, groups: Sequence[tuple[DraftKvState, StepRows, list[int]]]
    ) -> None:
        """The model has computed these rows."""

    def _group(
        self,
        request: int,
        held: DraftKvState,
        nodes: Sequence[Node],
        busy: Collection[int],
        most: int | None = None,
    ) -> StepRows | None:
        """Rows of one request: missing committed tokens as a causal chunk, then missing nodes, parents first;
        without nodes at most so many of the tokens."""
        if len(held.slots) == len(held.tokens) and any(node.parent is None for node in nodes):
            self.pool.free([held.slots.pop()])  # the root's logits are wanted again
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
        new_nodes = dict(zip(tree.missing, slots[tree.fed :], strict=True))
        after = [first + 1 + nodes[index].depth for index in order]
        names = [nodes[index].name for index in order]
        return StepRows(request, part, new_nodes, tree.parents, slots[: tree.fed], order, after, names)

    def _keep(self, groups: Sequence[tuple[DraftKvState, StepRows, list[int]]]) -> None:
        for held, group, _ in groups:
            held.slots.extend(group.fed)
            held.nodes.update(group.new_nodes)

    def _rank(self, logits: torch.Tensor, wish: RankingInputs) -> Sequence[Candidates]:
        """Noisy scores and their best children."""
        return CandidateBatch(
            *rank_children(
                logits, wish.keys, self._noise, wish.scales, self._fan_out, self._native, wish.lines
            )
        )

    def _allocate(self, count: int, near: int | None, busy: Collection[int]) -> list[int] | None:
        """Slots, taken from the least recently expanded other requests when there are too few."""
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
            self.pool.free(idle.all_slots())


def _in_order(ranked: Sequence[Candidates], wanted: list[int], picks: int) -> Sequence[Candidates | None]:
    """What was found for the picks `wanted`, in the order of all."""
    if wanted == list(range(picks)):
        return ranked
    if isinstance(ranked, CandidateBatch) and len(wanted) == picks:
        rows = np.argsort(wanted)
        return CandidateBatch(
            ranked.tokens[rows],
            ranked.log_probabilities[rows],
            ranked.scores[rows],
            ranked.expected_scores[rows],
        )
    places = {index: row for row, index in enumerate(wanted)}
    return [ranked[places[index]] if index in places else None for index in range(picks)]
