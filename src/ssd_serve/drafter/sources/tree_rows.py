"""The rows of one request in a draft step: committed tokens without KV, then nodes. Knows no models."""

from dataclasses import dataclass, field

from ssd_serve.cache.node import Node
from ssd_serve.cache.slots import SlotTable
from ssd_serve.kernels.batch import RequestRows

MAX_PREFILL_ROWS = 512
_MIN_PREFILL_ROWS = 64
_PREFILL_STEP_S = 0.03
"""Time of a prefill chunk, so that other drafts do not wait longer."""


def prefill_rows_of(prefill_s_per_token: float) -> int:
    """Prefill tokens of a step: as many as take about 30 ms, between 64 and 512."""
    return min(MAX_PREFILL_ROWS, max(_MIN_PREFILL_ROWS, int(_PREFILL_STEP_S / prefill_s_per_token)))


@dataclass(slots=True)
class DraftKvState:
    """The KV of one request: slots of committed tokens in order, and of nodes by name."""

    tokens: list[int]
    """Committed tokens from position `start` on; the first of them have `slots`."""
    seed: int | None
    """None, with temperature 0: no noise."""
    temperature: float
    start: int = 0
    slots: SlotTable = field(default_factory=SlotTable)
    nodes: dict[int, int] = field(default_factory=dict)

    def take_slots(self) -> list[int]:
        """Forget all slots and return them."""
        taken = [*self.slots.take(), *self.nodes.values()]
        self.nodes.clear()
        return taken


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows of one request in a step, committed tokens before nodes."""

    request: int
    rows: RequestRows
    new_nodes: dict[int, int]
    parents: list[int]
    """Names of the new nodes' parents."""
    committed: list[int]
    """Committed tokens among the rows."""
    order: list[int]
    """Indices of the requested nodes in the order of their rows."""
    after: list[int]
    """Positions of the drafted tokens: those after the requested nodes."""
    names: list[int]
    """Names of the requested nodes."""


_Place = tuple[int, int, int]
"""A node's row (-1: it has KV already) and the two ancestor masks of its chain: new rows, cached nodes."""


class TreeRowBuilder:
    """Collects rows: committed tokens without KV, then nodes without KV.

    Tree slots are numbered: the new rows in order, then cached nodes that are ancestors of a new row. The
    number of new rows is known last, so the bits of cached ancestors are shifted at the end.
    """

    def __init__(self, held: DraftKvState, first: int, most: int | None = None) -> None:
        """`first` is the position of nodes of depth 0; at most `most` committed tokens are added."""
        committed = held.tokens[len(held.slots) :][:most]
        self.tokens = committed
        self.committed = len(committed)
        begin = held.start + len(held.slots)
        self.positions = list(range(begin, begin + self.committed))
        self.missing: list[int] = []
        self.parents: list[int] = []
        self.earlier: list[int] = []
        self.earlier_positions: list[int] = []
        self._known = held.nodes
        self._first = first
        self._masks = [((2 << index) - 1, 0) for index in range(self.committed)]
        own, earlier = self._masks[-1] if committed else (0, 0)
        self._root: _Place = self.committed - 1, own, earlier
        self._places: dict[int, _Place] = {}

    @property
    def ancestry(self) -> list[int]:
        """The rows' ancestor masks."""
        new = len(self.tokens)
        return [own | earlier << new for own, earlier in self._masks]

    def row_of(self, node: Node) -> int:
        """The row of a node; missing ancestors are added before it."""
        return self._place(node)[0]

    def _place(self, node: Node) -> _Place:
        name, parent = node.name, node.parent
        place = self._places.get(name)
        if place is not None:
            return place
        if parent is None:
            return self._root
        _, own, earlier = self._places.get(parent.name) or self._place(parent)
        slot = self._known.get(name)
        if slot is not None:
            row = -1
            earlier |= 1 << len(self.earlier)
            self.earlier.append(slot)
            self.earlier_positions.append(self._first + node.depth)
        else:
            row = len(self.tokens)
            own |= 1 << row
            self.tokens.append(node.token)
            self.positions.append(self._first + node.depth)
            self.missing.append(name)
            self.parents.append(parent.name)
            self._masks.append((own, earlier))
        place = self._places[name] = row, own, earlier
        return place


def root_of(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node
