"""Counters of an engine and its requests: time, tokens, and acceptance by depth and by draft source.

A source is a bit, and a node has a set of them: nodes are counted by set, and reported by source. Knows
replicas, but not which sources exist.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from ssd_serve.base.messages import AcceptanceHealth, DecisionMessage, Figures, SourceFigures
from ssd_serve.cache.replica import Replica


def _counts() -> defaultdict[int, int]:
    return defaultdict(int)


@dataclass(slots=True)
class Acceptance:
    """Counters of one request, or of several."""

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
    ) -> Sequence[int]:
        """Add a round's nodes, before the replica's root moves, and return the sources of each node. `parents` and
        `accepted` are indices of nodes. A source that proposed a node only during its verification counts, too."""
        self.accepted_depths[len(accepted)] += 1
        if not tokens:
            self.verified_depths[0] += 1
            return ()
        self.verified_depths[max(depths)] += 1
        sources = replica.sources
        if not sources & (sources - 1):  # only one has grown it: nothing to look for
            self.verified[sources] += len(tokens)
            self.accepted[sources] += len(accepted)
            return [sources] * len(tokens)
        proposed_by, verified = replica.sources_of(tokens, parents), self.verified
        for sources in proposed_by:
            verified[sources] += 1
        for place in accepted:
            self.accepted[proposed_by[place]] += 1
        return proposed_by

    def add(self, other: "Acceptance") -> None:
        """Add the counts of another request."""
        for mine, its in (
            (self.verified_depths, other.verified_depths),
            (self.accepted_depths, other.accepted_depths),
            (self.verified, other.verified),
            (self.accepted, other.accepted),
        ):
            for key, count in its.items():
                mine[key] += count

    def add_to(self, figures: Figures, names: Sequence[str]) -> Figures:
        """Return a copy of these figures with acceptance by depth and source. `names`: sources by their
        bits."""
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


_PRIOR = 0.5
"""Prior of the share of accepted levels before any text was drafted."""
_PRIOR_LEVELS = 10.0
"""Levels that the prior of a text weighs: texts differ by about 0.15 around the share of all texts."""
_FORGOTTEN = 512
"""Tokens of a request after which a level counts little: what could not be drafted is tried again later."""


@dataclass(slots=True)
class DraftedLevels:
    """Share of the tree levels with nodes of draft models at which one of them was accepted. Levels of lookups do
    not count: lookups work in every mode."""

    prior: float = _PRIOR
    accepted: float = 0.0
    levels: float = 0.0

    @property
    def share(self) -> float:
        """Expected share of accepted levels."""
        return (self.accepted + _PRIOR_LEVELS * self.prior) / (self.levels + _PRIOR_LEVELS)

    @property
    def hopeful(self) -> float:
        """Upper estimate of the share: by a standard deviation."""
        share = self.share
        return share + math.sqrt(share * (1 - share) / (self.levels + _PRIOR_LEVELS))

    def observe(self, accepted: int, levels: int, tokens: float) -> None:
        """Count the levels of a round that committed `tokens` tokens of a request."""
        if not levels and not self.levels:
            return
        fading = (1 - 1 / _FORGOTTEN) ** tokens
        self.accepted = fading * self.accepted + accepted
        self.levels = fading * self.levels + levels

    def next_text(self) -> "DraftedLevels":
        """Return the counts of a new text, which is expected to be like the others."""
        return DraftedLevels(self.share)


def drafted_levels(
    sources: Sequence[int], parents: Sequence[int], accepted: Sequence[int], lookups: int
) -> tuple[int, int]:
    """Return how many levels of a round's nodes had an accepted node of a draft model, and how many levels that the
    text reached had any. `sources` and `lookups` are bits."""
    reached = {-1, *accepted}
    levels = {
        above for above, bits in zip(parents, sources, strict=True) if bits & ~lookups and above in reached
    }
    return sum([bool(sources[place] & ~lookups) for place in accepted]), len(levels)


@dataclass(slots=True)
class TimeTotals:
    """Seconds since start by kind of work, with the number of rounds and rows."""

    forward_s: float = 0.0
    wait_s: float = 0.0
    total_s: float = 0.0
    rounds: int = 0
    rows: int = 0

    @property
    def host_s(self) -> float:
        """Seconds that were neither a forward nor a deliberate wait."""
        return self.total_s - self.forward_s - self.wait_s

    def add(self, rows: int, forward_s: float, wait_s: float, total_s: float) -> None:
        self.forward_s += forward_s
        self.wait_s += wait_s
        self.total_s += total_s
        self.rounds += 1
        self.rows += rows


@dataclass(slots=True)
class Totals:
    """Counters since start."""

    figures: Figures = field(default_factory=Figures)
    acceptance: Acceptance = field(default_factory=Acceptance)
    """Counters of finished requests."""
    prompt_tokens: int = 0
    awaited_expansions: int = 0
    """Expanded nodes that a round waited for."""
    late_expansions: int = 0
    """Expansions that arrived after the root had moved past their node."""
    expected_tokens: float = 0.0
    """Expected tokens of rounds with nodes by the reach of the nodes, and their tokens."""
    given_tokens: int = 0

    def compare(self, decision: DecisionMessage, tokens: int) -> None:
        """Compare a round's tokens with its estimate, if it had the nodes that were chosen."""
        chosen = decision.chosen
        if chosen is not None and decision.nodes and decision.nodes == chosen.nodes:
            self.expected_tokens += chosen.tokens
            self.given_tokens += tokens

    def snapshot(self, running: Iterable[Acceptance], sources: Sequence[str]) -> Figures:
        """Return a copy of the figures with the acceptance of finished and `running` requests. `sources`: names
        in the order of their bits."""
        acceptance = Acceptance()
        for each in (self.acceptance, *running):
            acceptance.add(each)
        return acceptance.add_to(self.figures, sources)


_SLOW, _FAST = 1 / 2048, 1 / 128
"""Weights of a round: history over some minutes, the present over some seconds."""
_SETTLED = 1024
"""Rounds of history before anything is compared with it."""
_COLLAPSED, _RECOVERED = 0.4, 0.7
"""Shares of the history's acceptance."""
_NEVER = 256
"""Rounds of the engine in which drafts gave nothing: no guess right, no root ready."""


@dataclass(slots=True)
class _Mean:
    weight: float
    value: float = 0.0
    rounds: int = 0

    def add(self, seen: float) -> None:
        self.rounds += 1
        self.value += max(self.weight, 1 / self.rounds) * (seen - self.value)


class AcceptanceMonitor:
    """Watches rounds of requests for which drafts were expected."""

    def __init__(self) -> None:
        self.health = AcceptanceHealth.GOOD
        self._history = _Mean(_SLOW)
        self._present = _Mean(_FAST)
        self._in_vain = 0
        self._gave = False

    def observe(self, right: bool | None, hit: bool) -> None:
        """Note a round of one request. `right`: whether its likeliest draft token was accepted, None if none
        was verified; `hit`: whether the new root was in the replica."""
        self._gave = self._gave or hit or bool(right)
        if right is not None:
            self._present.add(right)
            if self.health is not AcceptanceHealth.COLLAPSED:  # a collapse must not become what is usual
                self._history.add(right)

    def judge(self, drafting: bool) -> None:
        """The end of a round of the engine, in which requests decoded; without drafting nothing is wrong with
        drafts."""
        if not drafting:
            self.health, self._in_vain = AcceptanceHealth.GOOD, 0
            return
        self._in_vain = 0 if self._gave else self._in_vain + 1
        self._gave = False
        self.health = self._judge()

    def _judge(self) -> AcceptanceHealth:
        if self._in_vain >= _NEVER:
            return AcceptanceHealth.NEVER_HITS
        if self._history.rounds < _SETTLED or self._history.value < 0.1:
            return AcceptanceHealth.GOOD
        least = _RECOVERED if self.health is AcceptanceHealth.COLLAPSED else _COLLAPSED
        return (
            AcceptanceHealth.COLLAPSED
            if self._present.value < least * self._history.value
            else AcceptanceHealth.GOOD
        )
