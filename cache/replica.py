"""The speculation cache: the verifier's replica of the drafters' tree of one request.

It is filled by `Growth` messages in any order, late, twice or never, and it only ever answers which guesses
are there: the verifier trusts its tokens and its ancestry, never its completeness. It knows no sockets.
"""

from dataclasses import dataclass

from ssd_serve.cache.expansions import ROOT_STEP, Expansion, unpack
from ssd_serve.cache.tree import Advance, Node, SpeculationTree
from ssd_serve.messages import Growth

_ORPHAN_LIMIT = 256
_ORPHAN_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class _Orphan:
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
        self._orphans: list[_Orphan] = []
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
            if not self._attach(expansion) and len(self._orphans) < _ORPHAN_LIMIT:
                self._orphans.append(_Orphan(expansion, self._round))
        if self._orphans:
            self._adopt()
        return self._in_sequence(growth)

    def restart(self, source: str) -> None:
        """A drafter begins with this request, perhaps again: it will count its messages from 0."""
        self._next_sequence.pop(source, None)

    def advance(self, tokens: tuple[int, ...]) -> Advance:
        """Move the root along the committed tokens of a round."""
        self._round += 1
        advance = self.tree.advance(tokens)
        self._orphans = [each for each in self._orphans if each.round + _ORPHAN_ROUNDS > self._round]
        if self._orphans:
            self._adopt()
        return advance

    def _attach(self, expansion: Expansion) -> bool:
        """Whether the expanded node is known now; a full tree takes no more, which is not a reason to
        wait."""
        node = self._find(expansion)
        if node is None:
            return False
        self.tree.expand(node, expansion.tokens, expansion.log_probabilities)
        return True

    def _find(self, expansion: Expansion) -> Node | None:
        parent = None if expansion.step == ROOT_STEP else self.tree.get(expansion.parent)
        if parent is None:
            return self.tree.get(expansion.name)  # a root, or a node that has become one
        return self.tree.child(parent, expansion.step)

    def _in_sequence(self, growth: Growth) -> bool:
        expected = self._next_sequence.get(growth.source, 0)
        self._next_sequence[growth.source] = max(expected, growth.sequence + 1)
        return growth.snapshot or growth.sequence <= expected

    def _adopt(self) -> None:
        """Attach kept expansions whose node has come, until none fits any more."""
        before = -1
        while len(self._orphans) != before:
            before = len(self._orphans)
            self._orphans = [each for each in self._orphans if not self._attach(each.expansion)]
