"""A draft model as a draft source: keeps its KV by node name, feeds what is missing, ranks children.

Knows one model and the requests' committed tokens; it does not decide what is expanded and sees no sockets.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ssd_serve.cache.slots import SlotPool
from ssd_serve.cache.table import SlotTable
from ssd_serve.drafter.sources.contract import Candidates, NodeRequest
from ssd_serve.errors import DeviceMemoryError
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.messages import SamplingParameters
from ssd_serve.models.interface import Model
from ssd_serve.models.memory import release_memory, within_memory
from ssd_serve.sampling.choice import draft_scores, ranked_children
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.sampling.parameters import is_greedy


@dataclass(slots=True)
class _Held:
    """What is remembered of one request: `slots` are those of the first committed tokens, `nodes` by name."""

    tokens: list[int]
    parameters: SamplingParameters
    seed: int
    slots: SlotTable = field(default_factory=SlotTable)
    nodes: dict[int, int] = field(default_factory=dict)

    def all_slots(self) -> list[int]:
        taken = [*self.slots.take(), *self.nodes.values()]
        self.nodes.clear()
        return taken


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows of one request in a step, and where each pick's row lies among them."""

    rows: RequestRows
    new_nodes: dict[int, int]
    fed: list[int]
    order: list[int]
    """Indices of the picks in the order of their rows."""


@dataclass(frozen=True, slots=True)
class _Choices:
    """What the children of some picks depend on besides logits; seed None and temperature 0: no noise."""

    seeds: list[int | None]
    positions: list[int]
    temperatures: list[float]

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """What `NoiseRows.lines` is asked for."""
        keys = zip(self.seeds, self.positions, strict=True)
        return [(seed, position, 1) for seed, position in keys if seed is not None]


class _TreeRows:
    """The rows of one request: committed tokens not fed yet, then nodes that have no KV yet.

    Tree slots are numbered: first the new rows in order, then the nodes that have KV and are ancestors of a
    new row. How many new rows there are is known last, so the bits of those ancestors are shifted at the end.
    """

    def __init__(self, known: dict[int, int], fed: list[int], first: int, root: int) -> None:
        self.tokens = list(fed)
        self.positions = list(range(first, first + len(fed)))
        self.missing: list[int] = []
        self.earlier: list[int] = []
        self.earlier_positions: list[int] = []
        self._known = known
        self._root = root
        self._fed = len(fed)
        self._masks = [((2 << index) - 1, 0) for index in range(len(fed))]
        self._above = self._masks[-1] if fed else (0, 0)
        self._place: dict[int, tuple[int, int, int]] = {}

    @property
    def ancestry(self) -> list[int]:
        """One mask a row."""
        new = len(self.tokens)
        return [own | earlier << new for own, earlier in self._masks]

    def row_of(self, pick: NodeRequest) -> int:
        """The row whose logits `pick` wants; its chain is added as far as it is not there yet."""
        own, earlier = self._above
        row = self._fed - 1
        for depth, (name, token) in enumerate(zip(pick.path, pick.tokens, strict=True), 1):
            place = self._place.get(name)
            if place is None:
                place = self._place[name] = self._add(name, token, self._root + depth, own, earlier)
            row, own, earlier = place
        return row

    def _add(self, name: int, token: int, position: int, own: int, earlier: int) -> tuple[int, int, int]:
        """Row (-1: it has KV already) and masks of a chain that ends with this node."""
        slot = self._known.get(name)
        if slot is not None:
            self.earlier.append(slot)
            self.earlier_positions.append(position)
            return -1, own, earlier | 1 << len(self.earlier) - 1
        row = len(self.tokens)
        self.tokens.append(token)
        self.positions.append(position)
        self.missing.append(name)
        self._masks.append((own | 1 << row, earlier))
        return row, own | 1 << row, earlier


class ModelSource:
    """Expands nodes with one forward of `model`; `fan_out` children each."""

    def __init__(self, model: Model, pool: SlotPool, noise: NoiseRows, fan_out: int) -> None:
        self._model = model
        self._pool = pool
        self._noise = noise
        self._fan_out = fan_out
        self._requests: OrderedDict[int, _Held] = OrderedDict()
        self._captured_now = False

    @property
    def captured_now(self) -> bool:
        return self._captured_now

    def open(self, request: int, tokens: Sequence[int], parameters: SamplingParameters, seed: int) -> None:
        self.close(request)
        self._requests[request] = _Held(list(tokens), parameters, seed)

    def commit(self, request: int, tokens: Sequence[int], path: Sequence[int], kept: Sequence[int]) -> None:
        """KV of accepted nodes becomes committed KV where it follows without a gap."""
        held = self._requests[request]
        if len(held.slots) == len(held.tokens):
            for name in path:
                slot = held.nodes.pop(name, None)
                if slot is None:
                    break
                held.slots.extend([slot])
        held.tokens.extend(tokens)
        alive = set(kept)
        self._pool.free([slot for name, slot in held.nodes.items() if name not in alive])
        held.nodes = {name: slot for name, slot in held.nodes.items() if name in alive}

    def close(self, request: int) -> None:
        held = self._requests.pop(request, None)
        if held is not None:
            self._pool.free(held.all_slots())

    def expand(self, picks: Sequence[NodeRequest], scales: Sequence[float]) -> list[Candidates | None]:
        """One forward over the missing rows of all picks."""
        order: dict[int, list[int]] = {}
        for index, pick in enumerate(picks):
            order.setdefault(pick.request, []).append(index)
            self._requests.move_to_end(pick.request)
        groups: list[tuple[_Held, _Group, list[int]]] = []
        for request, indices in order.items():
            group = self._group(self._requests[request], [picks[index] for index in indices], set(order))
            if group is not None:
                groups.append((self._requests[request], group, [indices[place] for place in group.order]))
        found: list[Candidates | None] = [None] * len(picks)
        self._captured_now = False
        if groups:
            wanted = [index for _, _, indices in groups for index in indices]
            choices = self._choices([picks[index] for index in wanted])
            # Before the forward: on ROCm a copy to the device waits for what was started there.
            self._noise.lines(choices.spans)
            ranked = self._ranked_or_none(groups, choices, [scales[index] for index in wanted])
            if ranked is None:
                release_memory()
                return found
            for index, candidates in zip(wanted, ranked, strict=True):
                found[index] = candidates
        return found

    def _ranked_or_none(
        self, groups: Sequence[tuple[_Held, _Group, list[int]]], choices: _Choices, scales: Sequence[float]
    ) -> list[Candidates] | None:
        """The candidates of all groups' picks; None where the device has too little memory for them."""
        batch = build_batch([group.rows for _, group, _ in groups])
        try:
            result = within_memory(lambda: self._model.forward(batch))
        except DeviceMemoryError:
            for _, group, _ in groups:
                self._pool.free(group.rows.write_slots)
            return None
        self._keep(groups)
        result.completion.wait()
        self._captured_now = result.captured_now
        try:
            return within_memory(lambda: self._rank(result.logits, choices, scales))
        except DeviceMemoryError:
            return None

    def _group(self, held: _Held, picks: Sequence[NodeRequest], busy: set[int]) -> _Group | None:
        """Rows of one request: missing committed tokens as a causal chunk, then missing nodes, parents
        first."""
        if len(held.slots) == len(held.tokens) and not all(pick.path for pick in picks):
            self._pool.free([held.slots.pop()])  # the root's logits are wanted again
        fed = held.tokens[len(held.slots) :]
        first, root = len(held.slots), len(held.tokens) - 1
        tree = _TreeRows(held.nodes, fed, first, root)
        rows = [tree.row_of(pick) for pick in picks]
        slots = self._allocate(len(tree.tokens), held.slots.last(), busy)
        if slots is None:
            return None
        order = sorted(range(len(picks)), key=rows.__getitem__)
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
        new_nodes = dict(zip(tree.missing, slots[len(fed) :], strict=True))
        return _Group(part, new_nodes, slots[: len(fed)], order)

    def _keep(self, groups: Sequence[tuple[_Held, _Group, list[int]]]) -> None:
        for held, group, _ in groups:
            held.slots.extend(group.fed)
            held.nodes.update(group.new_nodes)

    def _choices(self, picks: Sequence[NodeRequest]) -> _Choices:
        choices = _Choices([], [], [])
        for pick in picks:
            held = self._requests[pick.request]
            greedy = is_greedy(held.parameters)
            choices.seeds.append(None if greedy else held.seed)
            choices.positions.append(len(held.tokens) + len(pick.path))
            choices.temperatures.append(0.0 if greedy else held.parameters.temperature)
        return choices

    def _rank(self, logits: torch.Tensor, choices: _Choices, scales: Sequence[float]) -> list[Candidates]:
        """Noisy scores and their best children: the noise of the position that follows each pick."""
        if choices.seeds.count(None) == len(choices.seeds):
            scores = draft_scores(logits, 0.0, None)
        else:
            temperatures = torch.tensor(choices.temperatures, device=logits.device)
            scores = draft_scores(logits, temperatures, self._noise.rows(choices.seeds, choices.positions))
        ranked = ranked_children(scores, torch.tensor(scales, dtype=torch.float32), self._fan_out)
        expected: list[float] = ranked.expected_score.tolist()
        columns = zip(ranked.tokens, ranked.log_probs, ranked.scores, expected, strict=True)
        return [Candidates(*column) for column in columns]

    def _allocate(self, count: int, near: int | None, busy: set[int]) -> list[int] | None:
        """Slots, taken from the least recently expanded other requests when there are too few."""
        while True:
            slots = self._pool.allocate(count, near=near)
            if slots is not None:
                return slots
            idle = next(
                (
                    held
                    for number, held in self._requests.items()
                    if number not in busy and (held.slots or held.nodes)
                ),
                None,
            )
            if idle is None:
                return None
            self._pool.free(idle.all_slots())
