"""The speculation cache: the verifier's replica of the drafters' tree of one request.

It is filled by `Growth` messages in any order, late, twice or never, and it only ever answers which guesses
are there: the verifier trusts its tokens and its ancestry, never its completeness. It knows no sockets.
"""

from dataclasses import dataclass

import numpy as np

from ssd_serve.cache.tree import Advance, SpeculationTree
from ssd_serve.messages import Growth

_ORPHAN_LIMIT = 256
_ORPHAN_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class _Orphan:
    parent: int
    token: int
    log_probability: float
    round: int


class Replica:
    """Tree of one (request, epoch). `limit` bounds its nodes; tokens are ids below `vocabulary`."""

    def __init__(self, request: int, epoch: int, root_name: int, limit: int, vocabulary: int) -> None:
        self.request = request
        self.epoch = epoch
        self.tree = SpeculationTree(root_name, limit)
        self._vocabulary = vocabulary
        self._next_sequence: dict[str, int] = {}
        self._orphans: list[_Orphan] = []
        self._round = 0

    def apply(self, growth: Growth) -> bool:
        """Add the edges of one message. False: messages before it are missing, so ask its drafter for a snapshot.

        Messages of other requests or epochs, malformed buffers and impossible tokens change nothing.
        """
        if growth.request != self.request or growth.epoch != self.epoch:
            return True
        edges = unpack_edges(growth)
        if edges is None:
            return True
        for parent, token, log_probability in edges:
            if not 0 <= token < self._vocabulary:
                continue
            if self.tree.add(parent, token, log_probability) is None:
                self._keep_orphan(_Orphan(parent, token, log_probability, self._round))
        if self._orphans:
            self._adopt()
        return self._in_sequence(growth)

    def advance(self, tokens: tuple[int, ...]) -> Advance:
        """Move the root along the committed tokens of a round."""
        self._round += 1
        advance = self.tree.advance(tokens)
        self._orphans = [edge for edge in self._orphans if edge.round + _ORPHAN_ROUNDS > self._round]
        if self._orphans:
            self._adopt()
        return advance

    def _in_sequence(self, growth: Growth) -> bool:
        expected = self._next_sequence.get(growth.source, 0)
        self._next_sequence[growth.source] = max(expected, growth.sequence + 1)
        return growth.snapshot or growth.sequence <= expected

    def _keep_orphan(self, edge: _Orphan) -> None:
        if edge.parent not in self.tree and len(self._orphans) < _ORPHAN_LIMIT:
            self._orphans.append(edge)

    def _adopt(self) -> None:
        """Attach kept edges whose parent has come, until none fits any more."""
        progress = True
        while progress:
            left = [
                edge
                for edge in self._orphans
                if edge.parent not in self.tree
                or self.tree.add(edge.parent, edge.token, edge.log_probability) is None
            ]
            progress = len(left) < len(self._orphans)
            self._orphans = left


def pack_edges(edges: list[tuple[int, int, float]]) -> tuple[bytes, bytes, bytes]:
    """Edges (parent name, token, conditional log-probability) as the three buffers of `Growth`."""
    return (
        np.array([edge[0] for edge in edges], dtype="<u8").tobytes(),
        np.array([edge[1] for edge in edges], dtype="<i4").tobytes(),
        np.array([edge[2] for edge in edges], dtype="<f4").tobytes(),
    )


def unpack_edges(growth: Growth) -> list[tuple[int, int, float]] | None:
    """The edges of a message, or None when its buffers do not fit each other."""
    count = len(growth.tokens) // 4
    if (len(growth.parents), len(growth.tokens), len(growth.log_probabilities)) != (
        8 * count,
        4 * count,
        4 * count,
    ):
        return None
    log_probabilities = np.frombuffer(growth.log_probabilities, dtype="<f4")
    if np.isnan(log_probabilities).any():
        return None
    parents: list[int] = np.frombuffer(growth.parents, dtype="<u8").tolist()
    tokens: list[int] = np.frombuffer(growth.tokens, dtype="<i4").tolist()
    values: list[float] = log_probabilities.tolist()
    return list(zip(parents, tokens, values, strict=True))
