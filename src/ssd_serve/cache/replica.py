"""The speculation cache: the verifier's replica of the drafters' trees of one request.

`Growth` messages may arrive in any order, late, twice or never. The verifier relies on the tokens and the
ancestry of nodes, never on completeness. The replica knows no sockets.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ssd_serve.base.draft_messages import Growth
from ssd_serve.cache.expansions import PackedExpansion, unpack
from ssd_serve.cache.tree import Advance, SpeculationTree

_ORPHAN_LIMIT = 256
_ORPHAN_ROUNDS = 2
_MERGED_A_MESSAGE = 16_384
"""Existing candidates that one message may touch: as many as a snapshot of a whole tree. More would let one
message stall a round."""


class _Orphan(NamedTuple):
    """An expansion of a node that has not arrived yet, with its arrival round and its source's bit."""

    expansion: PackedExpansion
    round: int
    source: int


class Replica:
    """Merges the trees of all drafters for one (request, epoch), with at most `limit` candidates.

    Invariants: every token is below `vocabulary`. At most 256 orphans with `limit` candidates wait, for two
    rounds at most. A message touches at most 16,384 candidates of others.
    """

    def __init__(self, request: int, epoch: int, root_name: int, limit: int, vocabulary: int) -> None:
        self.request = request
        self.epoch = epoch
        self.tree = SpeculationTree(root_name, limit)
        self.sources = 0
        """Bits of all sources that have grown it."""
        self._vocabulary = vocabulary
        self._next_sequence: dict[int, int] = {}
        self._orphans: dict[int, list[_Orphan]] = {}
        """Orphans by the name of their missing parent."""
        self._waiting = 0
        self._waiting_candidates = 0
        self._round = 0
        self._late = 0

    def apply(self, growth: Growth, sender: int = 0, source: int = 1) -> bool:
        """Add the expansions of one message of drafter `sender`; `source` is the bit of its source.

        Returns False if earlier messages are missing and a snapshot is needed. Messages of other requests or
        epochs and unknown tokens change nothing. Raises `ProtocolError` for malformed buffers.
        """
        if growth.request != self.request or growth.epoch != self.epoch:
            return True
        expansions = unpack(growth, self._vocabulary)
        if expansions is None:
            return True
        self.tree.merge_budget = _MERGED_A_MESSAGE
        self.sources |= source
        for expansion in expansions:
            if not self.tree.take(expansion, source):
                self._keep(_Orphan(expansion, self._round, source))
            elif expansion.name in self._orphans:
                self._adopt(expansion.name)
        return self._in_sequence(growth, sender)

    @property
    def merged(self) -> int:
        """Candidates of the last message that existed already."""
        return _MERGED_A_MESSAGE - self.tree.merge_budget

    def take_late(self) -> int:
        """Return and reset the count of expansions dropped because the root had moved past their node."""
        late, self._late = self._late, 0
        return late

    def restart(self, sender: int) -> None:
        """Expect sequence 0 from a drafter that opens the request again, or has disconnected."""
        self._next_sequence.pop(sender, None)

    def sources_of(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Bits of the sources that proposed each node.

        `parents` are indices of earlier nodes in the same list; -1 is the root.
        """
        known = {-1: self.tree.root}
        found: list[int] = []
        for token, above in zip(tokens, parents, strict=True):
            parent = known.get(above)
            if parent is None:
                parent = known[above] = known[parents[above]].children[tokens[above]]
            found.append(parent.sources_of(token))
        return found

    def advance(self, tokens: tuple[int, ...]) -> Advance:
        """Move the root along the committed tokens of a round."""
        self._round += 1
        self.tree.merge_budget = _MERGED_A_MESSAGE
        advance = self.tree.advance(tokens)
        if not self._orphans:
            return advance
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
        candidates = self._waiting_candidates + orphan.expansion.size
        if self._waiting < _ORPHAN_LIMIT and candidates <= self.tree.limit:
            self._orphans.setdefault(orphan.expansion.parent, []).append(orphan)
            self._waiting += 1
            self._waiting_candidates = candidates
        else:
            self._late += 1

    def _adopt(self, name: int) -> None:
        """Take the orphans below this node, and then the orphans below those."""
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
