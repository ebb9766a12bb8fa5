"""The rows of one request in a draft step: the committed tokens that its model has not read, and nodes.

Knows what is remembered of a request, and trees; no models and no memory.
"""

from dataclasses import dataclass, field

from ssd_serve.cache.node import Node
from ssd_serve.cache.slots import SlotTable
from ssd_serve.kernels.batch import RequestRows

MOST_TEXT_ROWS = 512
_LEAST_TEXT_ROWS = 64
_TEXT_S = 0.03


def text_rows_of(prefill_s_per_token: float) -> int:
    """How many tokens of a text a step reads where one takes `prefill_s_per_token` seconds: as many as take about 30 ms,
    so that nobody waits longer for other drafts."""
    return min(MOST_TEXT_ROWS, max(_LEAST_TEXT_ROWS, int(_TEXT_S / prefill_s_per_token)))


@dataclass(slots=True)
class DraftKvState:
    """What is remembered of one request: `tokens` are the committed ones from position `start` on, `slots`
    those of the first of them, `nodes` by name. seed None and temperature 0: no noise."""

    tokens: list[int]
    seed: int | None
    temperature: float
    start: int = 0
    slots: SlotTable = field(default_factory=SlotTable)
    nodes: dict[int, int] = field(default_factory=dict)

    def all_slots(self) -> list[int]:
        taken = [*self.slots.take(), *self.nodes.values()]
        self.nodes.clear()
        return taken


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows of one request in a step, committed tokens before nodes, and where each pick's row lies."""

    request: int
    rows: RequestRows
    new_nodes: dict[int, int]
    parents: list[int]
    """Names of the new nodes' parents."""
    fed: list[int]
    order: list[int]
    """Indices of the picks in the order of their rows."""
    after: list[int]
    """The positions that follow these picks."""
    names: list[int]
    """Those of the picks."""


_Place = tuple[int, int, int]
"""A node: its row (-1: it has KV already), and the masks of the chain that ends with it."""


class TreeRowBuilder:
    """The rows of one request: committed tokens not fed yet, then nodes that have no KV yet.

    Tree slots are numbered: first the new rows in order, then the nodes that have KV and are ancestors of a
    new row. How many new rows there are is known last, so the bits of those ancestors are shifted at the end.
    """

    def __init__(self, held: DraftKvState, first: int, most: int | None = None) -> None:
        """`first` is the position of nodes of depth 0; `most` committed tokens are fed."""
        fed = held.tokens[len(held.slots) :][:most]
        self.tokens = fed
        self.fed = len(fed)
        begin = held.start + len(held.slots)
        self.positions = list(range(begin, begin + self.fed))
        self.missing: list[int] = []
        self.parents: list[int] = []
        self.earlier: list[int] = []
        self.earlier_positions: list[int] = []
        self._known = held.nodes
        self._first = first
        self._masks = [((2 << index) - 1, 0) for index in range(self.fed)]
        own, earlier = self._masks[-1] if fed else (0, 0)
        self._root: _Place = self.fed - 1, own, earlier
        self._places: dict[int, _Place] = {}

    @property
    def ancestry(self) -> list[int]:
        """One mask a row."""
        new = len(self.tokens)
        return [own | earlier << new for own, earlier in self._masks]

    def row_of(self, node: Node) -> int:
        """The row whose logits a pick wants; its chain is added as far as it is not there yet."""
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
