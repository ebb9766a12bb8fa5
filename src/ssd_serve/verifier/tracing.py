"""Records the rounds of a request whose client asked for a trace, within fixed bounds.

Knows walks and replicas; decides nothing.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from ssd_serve.base.messages import RoundTrace, TraceGrowth, TraceNode

if TYPE_CHECKING:
    from ssd_serve.cache.node import Node
    from ssd_serve.cache.replica import Replica
    from ssd_serve.verifier.round import TreeTokens, Walk

MAX_ROUNDS = 512
"""Rounds with details; one more round tells that the trace was cut."""
MAX_NODES = 64
"""Nodes of a round, and messages of growth between two rounds."""


class RoundTimes(NamedTuple):
    """Clock times of a round's start and of its forward, and seconds of the forward and of waiting for drafts."""

    began: float = 0.0
    launched: float = 0.0
    forward_s: float = 0.0
    waited_s: float = 0.0


class RequestTrace:
    """Recorder of one request, from its arrival at the verifier."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start = clock()
        self._rounds = 0
        self._growth: list[tuple[float, int, int]] = []

    def on_growth(self, source: int, expansions: int) -> None:
        """Note expansions that arrived; `source` is the bit of their draft source."""
        if len(self._growth) < MAX_NODES and self._rounds < MAX_ROUNDS:
            self._growth.append((self._clock() - self._start, source, expansions))

    def round(self, walk: "Walk", times: RoundTimes, names: Sequence[str]) -> RoundTrace | None:
        """Return the trace of a walk, before the replica's root moves; None beyond the bound and for chunks of a
        prompt that are not the last. `names`: draft sources by their bits."""
        if not walk.tokens or self._rounds > MAX_ROUNDS:
            return None
        self._rounds += 1
        request, start = walk.work.chunk.request, self._start
        cut = self._rounds > MAX_ROUNDS
        kept = () if cut else _kept(len(walk.work.tree), walk.accepted)
        place = {-1: -1} | {node: index for index, node in enumerate(kept)}
        nodes = _described(request.replica, walk.work.tree, names) if kept else []
        growth, self._growth = self._growth, []
        return RoundTrace(
            times.began - start,
            self._clock() - start,
            times.launched - start,
            times.forward_s,
            times.waited_s,
            context=len(request.tokens),
            nodes=tuple([replace(nodes[node], parent=place[nodes[node].parent]) for node in kept]),
            left_out=0 if cut else len(walk.work.tree) - len(kept),
            accepted=tuple([place[node] for node in walk.accepted if node in place]),
            bonus=walk.tokens[-1],
            growth=tuple(
                [TraceGrowth(at_s, ",".join(_names(bits, names)), count) for at_s, bits, count in growth]
            ),
            first=self._rounds == 1,
            cut=cut,
        )


def _kept(count: int, accepted: Sequence[int]) -> Sequence[int]:
    """Return the indices of at most `MAX_NODES` nodes, each with its parent: the accepted ones and the first."""
    chosen = dict.fromkeys([*accepted, *range(count)])
    return sorted([*chosen][:MAX_NODES])


def _described(replica: "Replica | None", tree: "TreeTokens", names: Sequence[str]) -> list[TraceNode]:
    known: dict[int, Node | None] = {-1: replica.tree.root if replica is not None else None}
    found: list[TraceNode] = []
    for index, (token, above, depth) in enumerate(zip(tree.tokens, tree.parents, tree.depths, strict=True)):
        parent = known[above]
        if parent is None or token not in parent.tokens:
            known[index] = None
            found.append(TraceNode(token, above, depth, (), None, None))
            continue
        rank = parent.tokens.index(token)
        known[index] = parent.children.get(token)
        logprob = parent.cumulatives[rank] - parent.cumulative
        found.append(TraceNode(token, above, depth, _names(parent.sources_of(token), names), logprob, rank))
    return found


def _names(bits: int, names: Sequence[str]) -> tuple[str, ...]:
    return tuple([name for place, name in enumerate(names) if bits >> place & 1])
