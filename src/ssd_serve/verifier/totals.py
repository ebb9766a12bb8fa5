"""Counters of an engine since its start: where the time went, and what its rounds gave."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ssd_serve.base.messages import Figures
from ssd_serve.cache.replica import Replica
from ssd_serve.verifier.acceptance import Acceptance
from ssd_serve.verifier.control.decision import Decision
from ssd_serve.verifier.request import Request
from ssd_serve.verifier.round import Walk


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
    """Tokens that rounds with drafts should have given by the reach of their nodes, and those that they
    gave."""
    given_tokens: int = 0

    def compare(self, decision: Decision, walks: Iterable[Walk]) -> None:
        """Compare a round's tokens with its estimate, if it had the nodes that were chosen."""
        chosen = decision.chosen
        if chosen is not None and decision.nodes and decision.nodes == chosen.nodes:
            self.expected_tokens += chosen.tokens
            self.given_tokens += sum([len(walk.tokens) for walk in walks if walk.decoded])

    def snapshot(self, running: Iterable[Request], sources: Sequence[str]) -> Figures:
        """A copy of the figures, with the acceptance of the requests that run, too. `sources` are named in
        the order of their bits."""
        acceptance = Acceptance()
        for each in (self.acceptance, *(request.acceptance for request in running)):
            acceptance.add(each)
        return acceptance.add_to(self.figures, sources)


def count(kept: Sequence[Figures], walk: Walk, first: bool, replica: Replica | None, hit: bool) -> None:
    """Add a request's round to figures, of the round that ended its prompt (`first`) only the tokens.
    `replica`: where drafts were expected; `hit`: whether its new root was in it."""
    tokens, drafted, accepted = len(walk.tokens), len(walk.work.tree), len(walk.accepted)
    tree = replica.tree if replica is not None and hit else None
    depth, nodes = (tree.ready_depth(), len(tree)) if tree is not None else (0, 0)
    for figures in kept:
        figures.tokens += tokens
        if first:
            continue
        figures.rounds += 1
        figures.drafted += drafted
        figures.accepted += accepted
        if replica is None:
            continue
        figures.hits += hit
        figures.misses += not hit
        figures.ready_depth += depth
        figures.ready_nodes += nodes
