"""The KV of requests in a draft model, and the rows of one step: committed tokens, then nodes of trees.

Knows slots, nodes and ancestor masks; no model and no ranking.
"""

from dataclasses import dataclass, field

from ssd_serve.cache.node import Node
from ssd_serve.cache.slots import SlotTable
from ssd_serve.kernels.batch import RequestRows


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
    held: DraftKvState
    rows: RequestRows
    new_nodes: dict[int, int]
    parents: list[int]
    """Names of the new nodes' parents."""
    committed: list[int]
    """Slots of the committed tokens among the rows."""
    indices: list[int]
    """Indices of this request's nodes among the requested nodes of the step, in the order of their rows."""
    after: list[int]
    """Positions of the drafted tokens: those after the requested nodes."""
    names: list[int]
    """Names of the requested nodes."""
    counts: list[int]
    """Rows with logits of each requested node: its own, and those of copies of a token below it."""
    temporary: list[int]
    """Slots of the copies, which are free after the forward."""
    context: RequestRows | None = None
    """Rows of the same request that come before all requests' other rows: vectors whose KV is stored."""

    @property
    def allocated(self) -> list[int]:
        """Slots of all rows."""
        more = () if self.context is None else self.context.write_slots
        return [*more, *self.rows.write_slots]


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
        self.missing: dict[int, int] = {}
        """Rows of nodes, by name."""
        self.copies: list[int] = []
        """Rows of copies."""
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

    def append_copies(self, node: Node, token: int, most: int) -> int:
        """Append `most` copies of a token at the positions after a node, each below the one before it.

        Copies have no names, and no KV later.
        """
        _, own, earlier = self._place(node)
        for step in range(most):
            row = len(self.tokens)
            own |= 1 << row
            self.tokens.append(token)
            self.positions.append(self._first + node.depth + 1 + step)
            self.copies.append(row)
            self._masks.append((own, earlier))
        return most

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
            self.missing[name] = row
            self.parents.append(parent.name)
            self._masks.append((own, earlier))
        place = self._places[name] = row, own, earlier
        return place


def root_of(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node
