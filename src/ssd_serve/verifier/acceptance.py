"""Verified and accepted nodes by depth, and by the draft sources that had proposed them.

Sources are bits, and those of a node a set of them: nodes are counted by set, and told by source. Knows
replicas; not which sources there are.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from ssd_serve.cache.replica import Replica
from ssd_serve.base.messages import Figures, SourceFigures


def _counts() -> defaultdict[int, int]:
    return defaultdict(int)


@dataclass(slots=True)
class Acceptance:
    """Of one request, or of several."""

    verified_depths: defaultdict[int, int] = field(default_factory=_counts)
    """Rounds by the depth of the deepest node that they verified; 0: there was none."""
    accepted_depths: defaultdict[int, int] = field(default_factory=_counts)
    """Rounds by how many nodes they accepted."""
    verified: defaultdict[int, int] = field(default_factory=_counts)
    accepted: defaultdict[int, int] = field(default_factory=_counts)
    """Nodes by the set of their sources."""

    def count(
        self,
        replica: Replica,
        tokens: Sequence[int],
        parents: Sequence[int],
        depths: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        """Add a round's nodes, before the replica's root moves. `parents` and `accepted` are places among
        them. Who named a node only while it was verified has proposed it, too."""
        self.accepted_depths[len(accepted)] += 1
        if not tokens:
            self.verified_depths[0] += 1
            return
        self.verified_depths[max(depths)] += 1
        sources = replica.sources
        if not sources & (sources - 1):  # only one has grown it: nothing to look for
            self.verified[sources] += len(tokens)
            self.accepted[sources] += len(accepted)
            return
        proposers, verified = replica.proposers(tokens, parents), self.verified
        for sources in proposers:
            verified[sources] += 1
        for place in accepted:
            self.accepted[proposers[place]] += 1

    def add(self, other: "Acceptance") -> None:
        """Those of another request, too."""
        for mine, its in (
            (self.verified_depths, other.verified_depths),
            (self.accepted_depths, other.accepted_depths),
            (self.verified, other.verified),
            (self.accepted, other.accepted),
        ):
            for key, count in its.items():
                mine[key] += count

    def told(self, figures: Figures, names: Sequence[str]) -> Figures:
        """A copy of these figures that tells this, too. `names` of sources, in the order of their bits."""
        return replace(
            figures,
            verified_depths=_listed(self.verified_depths),
            accepted_depths=_listed(self.accepted_depths),
            sources=self._by_source(names),
        )

    def _by_source(self, names: Sequence[str]) -> dict[str, SourceFigures]:
        """A node of several sources counts for each of them."""
        found: dict[str, SourceFigures] = {}
        for sources, verified in self.verified.items():
            for place, name in enumerate(names):
                if sources >> place & 1:
                    known = found.get(name, SourceFigures(0, 0))
                    accepted = known.accepted + self.accepted.get(sources, 0)
                    found[name] = SourceFigures(known.verified + verified, accepted)
        return found


def _listed(counts: dict[int, int]) -> list[int]:
    return [counts.get(depth, 0) for depth in range(max(counts, default=-1) + 1)]
