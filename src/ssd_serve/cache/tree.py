"""The live speculation tree of one request: named nodes below a root that moves forward and is never thrown
away.

Both sides hold one: the drafter grows it, the verifier's replica mirrors it. A node's name is a 64-bit chain,
`name(child) = mix(name(parent), token)`, so that both sides name a new root alike, hit or miss. An expanded
node holds its ranked candidates as two lists; a candidate becomes a `Node` only when somebody looks at it, so
that a step costs time by expansions, not by guesses. Expansions that come packed stay so until somebody looks
at their node: of most nobody ever does. The tree knows no KV slots, no models and no messages.
"""

import heapq
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from ssd_serve.base.seeds import mix
from ssd_serve.cache.node import Node, SourceWeights, Unread, better, blend, move_below


class _Hanging(NamedTuple):
    """An expansion that nobody has looked at, the depth of its node, and the source that it came from."""

    expansion: Unread
    depth: int
    source: int


class Advance(NamedTuple):
    """What moving the root along committed tokens met."""

    path: tuple[Node, ...]
    """The nodes that the committed tokens were, as far as they were nodes."""
    hit: bool
    """Whether all of them were, so that the tree below the new root lives on."""


class SpeculationTree:
    """Named nodes below a root. Its size counts candidates: at most `limit` of them."""

    def __init__(self, root_name: int, limit: int) -> None:
        self.root = Node(root_name, -1, None, 0.0)
        self.limit = limit
        self.patience = sys.maxsize
        """How many candidates expansions of expanded nodes may still touch again: whoever takes them from
        strangers sets it."""
        self._weights = SourceWeights()
        self._known: dict[int, Node] = {root_name: self.root}
        self._unread: dict[int, _Hanging] = {}
        """By the name of their node, each after its parent's; none of these nodes has been looked at."""
        self._named: dict[tuple[int, int], int] = {}
        """Those names by parent and step: that is found sooner than a name is mixed."""
        self._size = 0
        self._deepest = 0
        """Depth of the deepest candidate, counted as the nodes' own."""

    def __len__(self) -> int:
        """Number of candidates below the root, looked at or not."""
        return self._size

    def get(self, name: int) -> Node | None:
        """The root, or a node that was looked at or whose expansion has come."""
        steps: list[int] = []
        while name not in self._known:
            hanging = self._unread.get(name)
            if hanging is None:
                return None
            steps.append(hanging.expansion.step)
            name = hanging.expansion.parent
        node: Node | None = self._known[name]
        while node is not None and steps:
            node = self.child(node, steps.pop())
        return node

    def child(self, node: Node, token: int) -> Node | None:
        """The child of `node` by this token, if it is a candidate."""
        found = node.children.get(token)
        if found is None and token in node.tokens:
            found = self._look(node, node.tokens.index(token))
        return found

    def child_at(self, node: Node, rank: int) -> Node:
        """The child of `node` of this rank."""
        return node.children.get(node.tokens[rank]) or self._look(node, rank)

    def expanded_child(self, node: Node, rank: int) -> Node | None:
        """The child of `node` of this rank, if its own candidates are known."""
        token = node.tokens[rank]
        child = node.children.get(token)
        if child is None and (node.name, token) in self._named:
            child = self._look(node, rank)
        return child if child is not None and child.tokens else None

    def take(self, expansion: Unread, source: int = 0) -> bool:
        """Give the node that an expansion names its candidates, read when somebody looks at it; False when
        the tree does not have the node. A full tree takes no more, which is not a reason to wait."""
        name = expansion.name
        if name in self._known or name in self._unread:
            node = self.get(name)
            if node is not None:
                self.expand(node, *expansion.read(), source)
            return True
        above = self._unread.get(expansion.parent)
        if above is not None:  # which candidates that one has is seen when somebody looks
            depth = above.depth + 1
        else:
            parent = self._known.get(expansion.parent)
            if parent is None or expansion.step not in parent.tokens:
                return False
            depth = parent.depth + 1
        size = expansion.size
        if size and self._size + size <= self.limit:
            self._unread[name] = _Hanging(expansion, depth, source)
            self._named[expansion.parent, expansion.step] = name
            self._size += size
            if depth >= self._deepest:
                self._deepest = depth + 1
        return True

    def expand(
        self, node: Node, tokens: Sequence[int], log_probabilities: Sequence[float], source: int = 0
    ) -> bool:
        """Give `node` its candidates, best first, with conditional log-probabilities; False when the tree is
        full. `source`: who names them, as a bit.

        A node that is expanded again has the candidates of both: by the same source, with the better estimate
        of each, so that said twice is the same as said once; by others, with what `blend` makes of them.
        """
        if node.tokens or len(set(tokens)) < len(tokens):
            return self._merge(node, tokens, log_probabilities, source)
        if self._size + len(tokens) > self.limit:
            return False
        if tokens and node.depth >= self._deepest:
            self._deepest = node.depth + 1
        above = node.cumulative
        values = [above + log_probability for log_probability in log_probabilities]
        if values and (values[0] > above or sorted(values, reverse=True) != values):
            values = list(accumulate(values, min, initial=above))[1:]  # ranked, whatever a drafter says
        node.tokens, node.cumulatives, node.proposed = list(tokens), values, source
        self._size += len(values)
        return True

    def grow(self, node: Node, tokens: list[int], cumulatives: list[float]) -> bool:
        """`expand` of a node that has no candidates yet, by whoever knows that these are different, and
        ranked, and has added up their log-probabilities; the tree keeps both lists."""
        if self._size + len(tokens) > self.limit:
            return False
        if node.depth >= self._deepest:
            self._deepest = node.depth + 1
        node.tokens, node.cumulatives = tokens, cumulatives
        self._size += len(tokens)
        return True

    def expanded(self) -> Iterator[Node]:
        """All expanded nodes, the root included, each after its parent."""
        for name in list(self._unread):
            self.get(name)
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            if node.tokens:
                yield node
                waiting.extend(node.children.values())

    def reach(self, node: Node) -> float:
        """Estimated probability that the target's trajectory passes through `node`, given the root."""
        return math.exp(node.cumulative - self.root.cumulative)

    def depth(self, node: Node) -> int:
        """Distance of `node` from the root."""
        return node.depth - self.root.depth

    def path(self, node: Node) -> list[Node]:
        """Nodes from the root's child down to `node`; empty for the root."""
        chain: list[Node] = []
        while node is not self.root and node.parent is not None:
            chain.append(node)
            node = node.parent
        chain.reverse()
        return chain

    def best(self, count: int, depth: int) -> list[Node]:
        """The `count` nodes of highest reach, at most `depth` below the root, each after its parent."""
        chosen: list[Node] = []
        deepest = self.root.depth + depth
        heap: list[tuple[float, int, Node, int]] = []
        order = 0
        if self.root.tokens and depth > 0:
            heap.append((-self.root.cumulatives[0], order, self.root, 0))
        while heap and len(chosen) < count:
            _, _, parent, rank = heapq.heappop(heap)
            node = self.child_at(parent, rank)
            chosen.append(node)
            for source, next_rank in ((parent, rank + 1), (node, 0)):
                if next_rank < len(source.tokens) and source.depth < deepest:
                    order += 1
                    heapq.heappush(heap, (-source.cumulatives[next_rank], order, source, next_rank))
        return chosen

    def ready_depth(self) -> int:
        """Depth of the deepest candidate below the root."""
        return max(0, self._deepest - self.root.depth)

    def advance(self, tokens: Sequence[int]) -> Advance:
        """Move the root along committed tokens. Below a hit everything stays; else the new root stands
        alone."""
        node, path = self.root, list[Node]()
        for token in tokens:
            if not isinstance(node.proposed, int):
                self._weights.observe(node.proposed, token)
            child = self.child(node, token)
            if child is None:
                break
            node = child
            path.append(node)
        hit = len(path) == len(tokens)
        if hit:
            self.root = node
            node.parent = None
        else:
            name = node.name
            for token in tokens[len(path) :]:
                name = mix(name, token)
            depth = self.root.depth + len(tokens)
            self.root = Node(name, tokens[-1], None, 0.0)
            self.root.depth = depth
            self._read(self.root)
        self._recount()
        return Advance(tuple(path), hit)

    def forget(self) -> None:
        """Let go of everything below the root."""
        self.root.tokens, self.root.cumulatives, self.root.children = [], [], {}
        self._recount()

    def _recount(self) -> None:
        known: dict[int, Node] = {}
        size, deepest = 0, 0
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            known[node.name] = node
            if node.tokens:
                size += len(node.tokens)
                deepest = max(deepest, node.depth + 1)
                waiting.extend(node.children.values())
        unread: dict[int, _Hanging] = {}
        for name, hanging in self._unread.items():
            expansion = hanging.expansion
            above = known.get(expansion.parent)
            if expansion.parent in unread or (above and expansion.step in above.tokens):
                unread[name] = hanging
                size += expansion.size
                deepest = max(deepest, hanging.depth + 1)
        self._named = {(each.expansion.parent, each.expansion.step): name for name, each in unread.items()}
        for name, node in self._known.items():
            if name not in known:
                node.parent = None  # else it and its parent would keep each other from being freed
        self._known, self._unread, self._size, self._deepest = known, unread, size, deepest

    def _look(self, node: Node, rank: int) -> Node:
        token = node.tokens[rank]
        name = self._named.get((node.name, token))
        unread = name is not None
        if name is None:
            name = mix(node.name, token)
        child = node.children[token] = self._known[name] = Node(name, token, node, node.cumulatives[rank])
        if unread:
            self._read(child)
        return child

    def _read(self, node: Node) -> None:
        """Give a node, looked at now for the first time, the candidates that came packed."""
        hanging = self._unread.pop(node.name, None)
        if hanging is not None:
            expansion = hanging.expansion
            del self._named[expansion.parent, expansion.step]
            self._size -= expansion.size
            self.expand(node, *expansion.read(), hanging.source)

    def _merge(
        self, node: Node, tokens: Sequence[int], log_probabilities: Sequence[float], source: int
    ) -> bool:
        self.patience -= len(node.tokens) + len(tokens)
        if self.patience < 0:
            return False
        mine = {token: min(value, 0.0) for token, value in _best(tokens, log_probabilities).items()}
        said: dict[int, dict[int, float]] = {}
        if node.proposed == source or not node.tokens:
            before = dict(zip(node.tokens, node.cumulatives, strict=True))
            merged = better(before, {token: node.cumulative + value for token, value in mine.items()})
        else:
            said = node.said()
            said = {**said, source: better(said.get(source, {}), mine)}
            blended = blend(said, self._weights)
            merged = {token: node.cumulative + value for token, value in blended.items()}
        more = len(merged) - len(node.tokens)
        if self._size + more > self.limit:
            return False
        self._size += more
        node.proposed = said or source
        if merged and node.depth >= self._deepest:
            self._deepest = node.depth + 1
        node.tokens = sorted(merged, key=lambda token: -merged[token])
        node.cumulatives = [merged[token] for token in node.tokens]
        for token, child in node.children.items():
            by, child.cumulative = merged[token] - child.cumulative, merged[token]
            if by:
                self.patience -= move_below(child, by)
        return True


def _best(tokens: Sequence[int], values: Sequence[float]) -> dict[int, float]:
    """By token; of one that is named twice the better value."""
    found: dict[int, float] = {}
    for token, value in zip(tokens, values, strict=True):
        found[token] = max(value, found.get(token, value))
    return found
