"""The speculation cache: the verifier's replica of the drafters' tree of one request.

It is filled by `Growth` messages in any order, late, twice or never, and it only ever answers which guesses
are there: the verifier trusts its tokens and its ancestry, never its completeness. It knows no sockets.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ssd_serve.base.draft_messages import Growth
from ssd_serve.cache.expansions import Packed, unpack
from ssd_serve.cache.tree import Advance, SpeculationTree

_ORPHAN_LIMIT = 256
_ORPHAN_ROUNDS = 2
_MERGED_A_MESSAGE = 16_384
"""Nodes that a message may touch again which were there: a snapshot of a whole tree touches as many. More
would let one message stop a round."""


class _Orphan(NamedTuple):
    """An expansion whose node is not known yet, the round in which it came, and its source."""

    expansion: Packed
    round: int
    source: int


class Replica:
    """Tree of one (request, epoch). `limit` bounds its candidates; tokens are ids below `vocabulary`."""

    def __init__(self, request: int, epoch: int, root_name: int, limit: int, vocabulary: int) -> None:
        self.request = request
        self.epoch = epoch
        self.tree = SpeculationTree(root_name, limit)
        self.sources = 0
        """All that have grown it, as bits."""
        self._vocabulary = vocabulary
        self._next_sequence: dict[int, int] = {}
        self._orphans: dict[int, list[_Orphan]] = {}
        """By the name of the node whose expansion they wait for."""
        self._waiting = 0
        self._waiting_candidates = 0
        self._round = 0
        self._late = 0

    def apply(self, growth: Growth, sender: int = 0, source: int = 1) -> bool:
        """Add what one message of this drafter, which guesses with this source (a bit), brings. False:
        messages before it are missing, so ask for a snapshot.

        Messages of other requests or epochs and impossible tokens change nothing; neither do malformed
        buffers, which are a `ProtocolError`.
        """
        if growth.request != self.request or growth.epoch != self.epoch:
            return True
        expansions = unpack(growth, self._vocabulary)
        if expansions is None:
            return True
        self.tree.patience = _MERGED_A_MESSAGE
        self.sources |= source
        for expansion in expansions:
            if not self.tree.take(expansion, source):
                self._keep(_Orphan(expansion, self._round, source))
            elif expansion.name in self._orphans:
                self._adopt(expansion.name)
        return self._in_sequence(growth, sender)

    @property
    def merged(self) -> int:
        """How much of what the last message brought was there already: candidates that it touched again."""
        return _MERGED_A_MESSAGE - self.tree.patience

    def take_late(self) -> int:
        """Expansions that were dropped since this was last asked, for the text had left their nodes."""
        late, self._late = self._late, 0
        return late

    def restart(self, sender: int) -> None:
        """A drafter begins with this request, perhaps again: it will count its messages from 0. Or it has
        left."""
        self._next_sequence.pop(sender, None)

    def proposers(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Who has proposed each of some nodes, as bits. `parents`: each one's place among them, after its own
        parent's; -1: the root."""
        known = {-1: self.tree.root}
        found: list[int] = []
        for token, above in zip(tokens, parents, strict=True):
            parent = known.get(above)
            if parent is None:
                parent = known[above] = known[parents[above]].children[tokens[above]]
            found.append(parent.proposers(token))
        return found

    def advance(self, tokens: tuple[int, ...]) -> Advance:
        """Move the root along the committed tokens of a round."""
        self._round += 1
        self.tree.patience = _MERGED_A_MESSAGE
        advance = self.tree.advance(tokens)
        left = [each for several in self._orphans.values() for each in several]
        self._orphans.clear()
        self._waiting = self._waiting_candidates = 0
        for orphan in left:
            if orphan.round + _ORPHAN_ROUNDS <= self._round:
                self._late += 1
                continue
            if self.tree.take(orphan.expansion, orphan.source):
                self._adopt(orphan.expansion.name)
            else:
                self._keep(orphan)
        return advance

    def _keep(self, orphan: _Orphan) -> None:
        """Keep an expansion for a while: its node may still come."""
        candidates = self._waiting_candidates + orphan.expansion.size
        if self._waiting < _ORPHAN_LIMIT and candidates <= self.tree.limit:
            self._orphans.setdefault(orphan.expansion.parent, []).append(orphan)
            self._waiting += 1
            self._waiting_candidates = candidates
        else:
            self._late += 1

    def _adopt(self, name: int) -> None:
        """Take what waited for the candidates of this node, and what waited for those of it."""
        names = [name]
        while names:
            for orphan in self._orphans.pop(names.pop(), ()):
                self._waiting -= 1
                self._waiting_candidates -= orphan.expansion.size
                if self.tree.take(orphan.expansion, orphan.source):
                    names.append(orphan.expansion.name)
                else:
                    self._keep(orphan)

    def _in_sequence(self, growth: Growth, sender: int) -> bool:
        expected = self._next_sequence.get(sender, 0)
        self._next_sequence[sender] = max(expected, growth.sequence + 1)
        return growth.snapshot or growth.sequence <= expected
