"""The speculation cache: the verifier's replica of the drafters' tree of one request.

It is filled by `Growth` messages in any order, late, twice or never, and it only ever answers which guesses
are there: the verifier trusts its tokens and its ancestry, never its completeness. It knows no sockets.
"""

from typing import NamedTuple

from ssd_serve.cache.expansions import ROOT_STEP, Expansion, unpack
from ssd_serve.cache.tree import Advance, Node, SpeculationTree
from ssd_serve.messages import Growth

_ORPHAN_LIMIT = 256
_ORPHAN_ROUNDS = 2


class _Orphan(NamedTuple):
    """An expansion whose node may not be known yet, and the round in which it came."""

    expansion: Expansion
    round: int


class Replica:
    """Tree of one (request, epoch). `limit` bounds its candidates; tokens are ids below `vocabulary`."""

    def __init__(self, request: int, epoch: int, root_name: int, limit: int, vocabulary: int) -> None:
        self.request = request
        self.epoch = epoch
        self.tree = SpeculationTree(root_name, limit)
        self._vocabulary = vocabulary
        self._next_sequence: dict[str, int] = {}
        self._orphans: dict[int, list[_Orphan]] = {}
        """By the name of the node whose expansion they wait for."""
        self._waiting = 0
        self._round = 0

    def apply(self, growth: Growth) -> bool:
        """Add what one message brings. False: messages before it are missing, so ask its drafter for a
        snapshot.

        Messages of other requests or epochs, malformed buffers and impossible tokens change nothing.
        """
        if growth.request != self.request or growth.epoch != self.epoch:
            return True
        expansions = unpack(growth, self._vocabulary)
        if expansions is None:
            return True
        for expansion in expansions:
            self._take(_Orphan(expansion, self._round))
        return self._in_sequence(growth)

    def restart(self, source: str) -> None:
        """A drafter begins with this request, perhaps again: it will count its messages from 0."""
        self._next_sequence.pop(source, None)

    def advance(self, tokens: tuple[int, ...]) -> Advance:
        """Move the root along the committed tokens of a round."""
        self._round += 1
        advance = self.tree.advance(tokens)
        left = [each for several in self._orphans.values() for each in several]
        self._orphans.clear()
        self._waiting = 0
        for orphan in left:
            if orphan.round + _ORPHAN_ROUNDS > self._round:
                self._take(orphan)
        return advance

    def _take(self, orphan: _Orphan) -> None:
        """Attach an expansion whose node is known, and those that waited for it; keep another for a while. A
        full tree takes no more, which is not a reason to wait."""
        found = [orphan]
        while found:
            each = found.pop()
            expansion = each.expansion
            node = self._find(expansion)
            if node is not None:
                self.tree.expand(node, expansion.tokens, expansion.log_probabilities)
                if self._waiting:
                    adopted = self._orphans.pop(node.name, [])
                    self._waiting -= len(adopted)
                    found.extend(adopted)
            elif self._waiting < _ORPHAN_LIMIT:
                self._orphans.setdefault(expansion.parent, []).append(each)
                self._waiting += 1

    def _find(self, expansion: Expansion) -> Node | None:
        parent = None if expansion.step == ROOT_STEP else self.tree.get(expansion.parent)
        if parent is None:
            return self.tree.get(expansion.name)  # a root, or a node that has become one
        return self.tree.child(parent, expansion.step)

    def _in_sequence(self, growth: Growth) -> bool:
        expected = self._next_sequence.get(growth.source, 0)
        self._next_sequence[growth.source] = max(expected, growth.sequence + 1)
        return growth.snapshot or growth.sequence <= expected
