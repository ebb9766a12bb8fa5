"""The live speculation tree of one request: named nodes below a root that moves forward.

The drafter grows one tree and the verifier's replica mirrors it. A node's name is a 64-bit chain,
`name(child) = mix(name(parent), token)`, so both sides name a new root alike, hit or miss. The tree knows no
KV slots, models or messages.

Lazy expansion. The time of a step must depend on its expansions, not on its candidates: most candidates are
never used. Example:

    root: Node, tokens [7, 3, 9]        candidates are two lists; a `Node` is made on access.
      +- 7: Node, tokens [4, 1].
      +- 3: no Node  <- pending: parent root, step 3, packed as received.
      |    `- 5      <- pending: parent "3", step 5; the parent may be pending, too.
      `- 9: no Node, not expanded.

`take` only files a `PackedExpansion` under the name of its node, with its size and depth. The first access to
that node creates the `Node` and unpacks the candidates into it (`_unpack`). Pending expansions that stand on
one another are materialized from the top down (`get`).
"""

import math
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from ssd_serve.base.seeds import mix
from ssd_serve.cache.expansions import PackedExpansion
from ssd_serve.cache.node import Node, SourceWeights, best_of, blend, shift_below


class PendingExpansion(NamedTuple):
    """A packed expansion of a node that has no `Node` object yet, with the node's depth and the source's
    bit."""

    expansion: PackedExpansion
    depth: int
    source: int


class Advance(NamedTuple):
    """The result of moving the root along committed tokens."""

    path: tuple[Node, ...]
    """Nodes of the committed tokens, up to the first token without one."""
    hit: bool
    """True if every token had a node, so that the tree below the new root is kept."""


class SpeculationTree:
    """Nodes below a root; `len` counts candidates.

    Invariants: there are at most `limit` candidates. A name is in `_known` (it has a `Node`) or in `_pending`
    (its expansion is packed), never in both. Each pending expansion's parent is in one of the two, and comes
    before it in `_pending`. Every node in `_known` is reachable from the root.
    """

    def __init__(self, root_name: int, limit: int) -> None:
        self.root = Node(root_name, -1, None, 0.0)
        self.limit = limit
        self.merge_budget = sys.maxsize
        """Candidates that repeated expansions may still touch; the replica resets it for each message."""
        self._weights = SourceWeights()
        self._known: dict[int, Node] = {root_name: self.root}
        self._pending: dict[int, PendingExpansion] = {}
        self._pending_names: dict[tuple[int, int], int] = {}
        """Names in `_pending` by parent and step: a look-up is faster than mixing a name."""
        self._size = 0
        self._deepest = 0
        """`Node.depth` of the deepest candidate."""

    def __len__(self) -> int:
        return self._size

    def get(self, name: int) -> Node | None:
        """The node of this name, materialized if only its expansion is known; None for other names."""
        steps: list[int] = []
        while name not in self._known:
            pending = self._pending.get(name)
            if pending is None:
                return None
            steps.append(pending.expansion.step)
            name = pending.expansion.parent
        node: Node | None = self._known[name]
        while node is not None and steps:
            node = self.child(node, steps.pop())
        return node

    def child(self, node: Node, token: int) -> Node | None:
        """The child of `node` by this token; None if it is no candidate."""
        found = node.children.get(token)
        if found is None and token in node.tokens:
            found = self._materialize(node, node.tokens.index(token))
        return found

    def child_at(self, node: Node, rank: int) -> Node:
        """The child of `node` of this rank."""
        return node.children.get(node.tokens[rank]) or self._materialize(node, rank)

    def expanded_child(self, node: Node, rank: int) -> Node | None:
        """The child of `node` of this rank, if it is expanded."""
        token = node.tokens[rank]
        child = node.children.get(token)
        if child is None and (node.name, token) in self._pending_names:
            child = self._materialize(node, rank)
        return child if child is not None and child.tokens else None

    def take(self, expansion: PackedExpansion, source: int = 0) -> bool:
        """Add an expansion, left packed until its node is accessed. False: the tree does not have the node.

        A full tree drops the expansion and returns True: waiting would not help.
        """
        name = expansion.name
        if name in self._known or name in self._pending:
            node = self.get(name)
            if node is not None:
                self.expand(node, *expansion.read(), source, expansion.fresh)
            return True
        above = self._pending.get(expansion.parent)
        if above is not None:  # whether its candidates include this step is checked on access
            depth = above.depth + 1
        else:
            parent = self._known.get(expansion.parent)
            if parent is None or expansion.step not in parent.tokens:
                return False
            depth = parent.depth + 1
        size = expansion.size
        if size and self._size + size <= self.limit:
            self._pending[name] = PendingExpansion(expansion, depth, source)
            self._pending_names[expansion.parent, expansion.step] = name
            self._size += size
            if depth >= self._deepest:
                self._deepest = depth + 1
        return True

    def expand(
        self,
        node: Node,
        tokens: Sequence[int],
        log_probabilities: Sequence[float],
        source: int = 0,
        fresh: bool = False,
    ) -> bool:
        """Give `node` its candidates, best first, with conditional log-probabilities. False: the tree is
        full.

        A second expansion is merged: the same source keeps the better estimate of each token, so duplicates
        are harmless; estimates of different sources (one bit each) are blended. `fresh` ones of the same source
        replace the others.
        """
        if node.tokens or len(set(tokens)) < len(tokens):
            return self._merge(node, tokens, log_probabilities, source, fresh)
        if self._size + len(tokens) > self.limit:
            return False
        if tokens and node.depth >= self._deepest:
            self._deepest = node.depth + 1
        above = node.cumulative
        values = [above + log_probability for log_probability in log_probabilities]
        if values and (values[0] > above or sorted(values, reverse=True) != values):
            values = list(accumulate(values, min, initial=above))[1:]  # a drafter may send unranked values
        node.tokens, node.cumulatives, node.estimates = list(tokens), values, source
        self._size += len(values)
        return True

    def grow(self, node: Node, tokens: list[int], cumulatives: list[float]) -> bool:
        """`expand` without checks, for an unexpanded node; keeps both lists.

        The caller guarantees that tokens are distinct and ranked, and passes summed log-probabilities.
        """
        if self._size + len(tokens) > self.limit:
            return False
        if node.depth >= self._deepest:
            self._deepest = node.depth + 1
        node.tokens, node.cumulatives = tokens, cumulatives
        self._size += len(tokens)
        return True

    def expanded(self) -> Iterator[Node]:
        """Iterate over expanded nodes including the root, each after its parent."""
        for name in list(self._pending):
            self.get(name)
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            if node.tokens:
                yield node
                waiting.extend(node.children.values())

    def path(self, node: Node) -> list[Node]:
        """Nodes from the root's child down to `node`; empty for the root."""
        chain: list[Node] = []
        while node is not self.root and node.parent is not None:
            chain.append(node)
            node = node.parent
        chain.reverse()
        return chain

    def ready_depth(self) -> int:
        """Levels of candidates below the root."""
        return max(0, self._deepest - self.root.depth)

    def advance(self, tokens: Sequence[int]) -> Advance:
        """Move the root along committed tokens. After a miss the new root has no candidates."""
        node, path = self.root, list[Node]()
        for token in tokens:
            if not isinstance(node.estimates, int):
                self._weights.observe(node.estimates, token)
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
            if not self._size:  # as in most rounds without drafts
                root = self.root
                root.name, root.token, root.depth, root.cumulative = name, tokens[-1], depth, 0.0
                self._known, self._deepest = {name: self.root}, 0
                return Advance((), hit=False)
            self.root = Node(name, tokens[-1], None, 0.0)
            self.root.depth = depth
            self._unpack(self.root)
        self._recount()
        return Advance(tuple(path), hit)

    def clear(self) -> None:
        """Drop everything below the root."""
        self.root.tokens, self.root.cumulatives, self.root.children = [], [], {}
        self._recount()

    def _recount(self) -> None:
        """Restore the invariants after the root moved: drop what is not below it."""
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
        kept: dict[int, PendingExpansion] = {}
        for name, pending in self._pending.items():
            expansion = pending.expansion
            above = known.get(expansion.parent)
            if expansion.parent in kept or (above and expansion.step in above.tokens):
                kept[name] = pending
                size += expansion.size
                deepest = max(deepest, pending.depth + 1)
        self._pending_names = {
            (each.expansion.parent, each.expansion.step): name for name, each in kept.items()
        }
        for name, node in self._known.items():
            if name not in known:
                node.parent = None  # breaks the reference cycle between parent and child
        self._known, self._pending, self._size, self._deepest = known, kept, size, deepest

    def _materialize(self, node: Node, rank: int) -> Node:
        token = node.tokens[rank]
        name = self._pending_names.get((node.name, token))
        is_pending = name is not None
        if name is None:
            name = mix(node.name, token)
        child = node.children[token] = self._known[name] = Node(name, token, node, node.cumulatives[rank])
        if is_pending:
            self._unpack(child)
        return child

    def _unpack(self, node: Node) -> None:
        pending = self._pending.pop(node.name, None)
        if pending is not None:
            expansion = pending.expansion
            del self._pending_names[expansion.parent, expansion.step]
            self._size -= expansion.size
            self.expand(node, *expansion.read(), pending.source, expansion.fresh)

    def _merge(
        self,
        node: Node,
        tokens: Sequence[int],
        log_probabilities: Sequence[float],
        source: int,
        fresh: bool,
    ) -> bool:
        self.merge_budget -= len(node.tokens) + len(tokens)
        if self.merge_budget < 0:
            return False
        new: dict[int, float] = {}
        for token, value in zip(tokens, log_probabilities, strict=True):
            new[token] = max(min(value, 0.0), new.get(token, -math.inf))
        estimates: dict[int, dict[int, float]] = {}
        if node.estimates == source or not node.tokens:
            before = dict(zip(node.tokens, node.cumulatives, strict=True))
            found = {token: node.cumulative + value for token, value in new.items()}
            if fresh:  # tokens that are no candidates any more stay as the least likely: a round may use them
                least = min(found.values())
                before = {token: min(value, least) for token, value in before.items() if token not in found}
            merged = best_of(found, before)
        else:
            estimates = node.source_estimates()
            estimates = {**estimates, source: best_of(estimates.get(source, {}), new)}
            blended = blend(estimates, self._weights)
            merged = {token: node.cumulative + value for token, value in blended.items()}
        more = len(merged) - len(node.tokens)
        if self._size + more > self.limit:
            return False
        self._size += more
        node.estimates = estimates or source
        if merged and node.depth >= self._deepest:
            self._deepest = node.depth + 1
        node.tokens = sorted(merged, key=lambda token: -merged[token])
        node.cumulatives = [merged[token] for token in node.tokens]
        for token, child in node.children.items():
            by, child.cumulative = merged[token] - child.cumulative, merged[token]
            if by:
                self.merge_budget -= shift_below(child, by)
        return True
