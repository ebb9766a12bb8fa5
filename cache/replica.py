"""The speculation cache: the verifier's replica of the drafters' tree of one request.

It is filled by `Growth` messages in any order, late, twice or never, and it only ever answers which guesses
are there: the verifier trusts its tokens and its ancestry, never its completeness. It knows no sockets.
"""

from typing import NamedTuple

from ssd_serve.cache.expansions import Packed, unpack
from ssd_serve.cache.tree import Advance, SpeculationTree
from ssd_serve.messages import Growth

_ORPHAN_LIMIT = 256
_ORPHAN_ROUNDS = 2


class _Orphan(NamedTuple):
    """An expansion whose node is not known yet, and the round in which it came."""

    expansion: Packed
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
            if not self.tree.take(expansion):
                self._keep(_Orphan(expansion, self._round))
            elif expansion.name in self._orphans:
                self._adopt(expansion.name)
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
            if orphan.round + _ORPHAN_ROUNDS <= self._round:
                continue
            if self.tree.take(orphan.expansion):
                self._adopt(orphan.expansion.name)
            else:
                self._keep(orphan)
        return advance

    def _keep(self, orphan: _Orphan) -> None:
        """Keep an expansion for a while: its node may still come."""
        if self._waiting < _ORPHAN_LIMIT:
            self._orphans.setdefault(orphan.expansion.parent, []).append(orphan)
            self._waiting += 1

    def _adopt(self, name: int) -> None:
        """Take what waited for the candidates of this node, and what waited for those of it."""
        names = [name]
        while names:
            for orphan in self._orphans.pop(names.pop(), ()):
                self._waiting -= 1
                if self.tree.take(orphan.expansion):
                    names.append(orphan.expansion.name)
                else:
                    self._keep(orphan)

    def _in_sequence(self, growth: Growth) -> bool:
        expected = self._next_sequence.get(growth.source, 0)
        self._next_sequence[growth.source] = max(expected, growth.sequence + 1)
        return growth.snapshot or growth.sequence <= expected
