"""Counters of an engine since its start: where the time went, and what its rounds gave."""

from dataclasses import dataclass, field

from ssd_serve.cache.replica import Replica
from ssd_serve.messages import Figures
from ssd_serve.verifier.round import Walk


@dataclass(slots=True)
class Clocked:
    """Where the time went, in seconds since start, and how many rounds and rows there were."""

    forward_s: float = 0.0
    wait_s: float = 0.0
    total_s: float = 0.0
    rounds: int = 0
    rows: int = 0

    @property
    def host_s(self) -> float:
        """Everything that was neither a forward nor a deliberate wait."""
        return self.total_s - self.forward_s - self.wait_s

    def add(self, rows: int, forward_s: float, wait_s: float, total_s: float) -> None:
        """One more round."""
        self.forward_s += forward_s
        self.wait_s += wait_s
        self.total_s += total_s
        self.rounds += 1
        self.rows += rows


@dataclass(slots=True)
class Totals:
    """Counters since start."""

    figures: Figures = field(default_factory=Figures)
    prompt_tokens: int = 0


def count(figures: Figures, walk: Walk, first: bool, replica: Replica | None, hit: bool) -> None:
    """Add a request's round, of the round that ended its prompt (`first`) only the tokens. `replica`: where
    drafts were expected; `hit`: whether its new root was in it."""
    figures.tokens += len(walk.tokens)
    if first:
        return
    figures.rounds += 1
    figures.drafted += len(walk.work.tree)
    figures.accepted += len(walk.accepted)
    if replica is None:
        return
    figures.hits += hit
    figures.misses += not hit
    if hit:
        figures.ready_depth += replica.tree.ready_depth()
        figures.ready_nodes += len(replica.tree)
