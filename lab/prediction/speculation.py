"""Rounds of the published ways to speculate, in arithmetic: a chain in turns, and a table of outcomes beside.

A draft's first guess is right with one probability everywhere, as in `ssd plan`. Source of the table: arXiv
2603.03251; its order of forwards: github.com/tanishqkumar/ssd. Knows step times, not where they come from.
"""

from dataclasses import dataclass, replace

from ssd_serve.plan.devices import Sheets
from ssd_serve.plan.forwards import Forward
from ssd_serve.plan.guesses import DraftQuality
from ssd_serve.plan.known_models import PlannedModel
from ssd_serve.plan.virtual_time import MESSAGE_S

_HALVINGS = 60


@dataclass(frozen=True, slots=True)
class SplitPair:
    """A target split over `devices`, a draft on one, and what a draft forward costs beside its device's
    time."""

    platform: Sheets
    target: PlannedModel
    draft: PlannedModel
    devices: int
    context: int
    draft_host_s: float = 0.0

    def target_s(self, rows: int) -> float:
        """A forward of the target."""
        return self.platform.step_s(self.target, self.devices, Forward.of_one(rows, self.context))

    def draft_s(self, rows: int) -> float:
        """A forward of the draft."""
        forward_s = self.platform.step_s(self.draft, 1, Forward.of_one(rows, self.context))
        return forward_s + self.draft_host_s


@dataclass(frozen=True, slots=True)
class Predicted:
    """A mean round. `draft_s`: what the target waits for drafts."""

    tokens: float
    target_s: float
    draft_s: float = 0.0
    hit_rate: float = 1.0

    @property
    def tokens_per_s(self) -> float:
        """Of one request."""
        return self.tokens / (self.target_s + self.draft_s)


def plain(pair: SplitPair) -> Predicted:
    """One token a forward."""
    return Predicted(1.0, pair.target_s(1))


def chain(pair: SplitPair, acceptance: float, length: int) -> Predicted:
    """`length` drafts one after the other, and one more forward that only fills the draft's cache; then the
    target."""
    return Predicted(
        chain_tokens(acceptance, length), pair.target_s(length + 1), (length + 1) * pair.draft_s(1)
    )


def table(pair: SplitPair, acceptance: float, length: int, fan_out: int) -> Predicted:
    """While the target verifies a chain, the draft reads that chain and drafts one for each of `fan_out`
    guesses at each of its places. A guess that comes true is a hit; after a miss the target waits for a
    chain."""
    target_s = pair.target_s(length + 1)
    beside_s = pair.draft_s(length + 1) + length * pair.draft_s(fan_out * (length + 1)) + 2 * MESSAGE_S
    hits = hit_rate(acceptance, length, fan_out)
    waited_s = max(0.0, beside_s - target_s) + 2 * MESSAGE_S + (1 - hits) * length * pair.draft_s(1)
    return Predicted(chain_tokens(acceptance, length), target_s, waited_s, hits)


def chain_tokens(acceptance: float, length: int) -> float:
    """Tokens a round commits: those accepted, and one of the target's own."""
    return sum(acceptance**accepted for accepted in range(length + 1))


def hit_rate(acceptance: float, length: int, fan_out: int) -> float:
    """How often the round's own token is among the guesses: the next ones after a rejected draft, the first
    ones after a chain that was accepted whole."""
    ranked = DraftQuality(acceptance).probabilities(fan_out + 1)
    whole = acceptance**length
    return (1 - whole) * sum(ranked[1:]) / (1 - acceptance) + whole * sum(ranked[:fan_out])


def acceptance_of(tokens: float, length: int) -> float:
    """The acceptance with which a chain of `length` gives so many tokens a round."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if chain_tokens(middle, length) < tokens else (low, middle)
    return low


def as_slow_as(pair: SplitPair, acceptance: float, length: int, tokens_per_s: float) -> SplitPair:
    """The same with the host time of a draft forward that makes its chain so fast."""
    free = chain(pair, acceptance, length)
    round_s = free.tokens / tokens_per_s
    more_s = (round_s - free.target_s - free.draft_s) / (length + 1)
    return replace(pair, draft_host_s=pair.draft_host_s + more_s)
