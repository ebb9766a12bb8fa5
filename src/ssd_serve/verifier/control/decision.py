"""What a round decided about drafts, and why: the one answer to "why does it not speculate now?".

A value that those who decide fill in. Knows no trees, no drafters and no governor.
"""

from dataclasses import dataclass, replace
from ssd_serve.base.messages import DecisionMessage, CostEstimate, DecisionReason
from enum import Enum


class SpeculationMode(Enum):
    """Who drafts: a drafter on its own device, one inline on the target's, or nobody."""

    ASYNC = "async"
    SYNC = "sync"
    PLAIN = "off"  # its name in /load, /metrics and files of gains


@dataclass(frozen=True, slots=True)
class Decision:
    """One round's. `chosen` is what it should give as it was chosen, `other` what the other way should give:
    no nodes for a round with nodes, one node for a round in which none was worth it, drafting for a layout
    without drafts. None: not known."""

    mode: SpeculationMode
    why: DecisionReason
    nodes: int
    """Verified, which memory may have made fewer than `chosen` says."""
    waited_s: float
    chosen: CostEstimate | None = None
    other: CostEstimate | None = None

    def launched(self, nodes: int, short: DecisionReason) -> "Decision":
        """With so many nodes in the end; `short` is why, where none is left of those that were chosen."""
        if nodes == self.nodes:
            return self
        return replace(self, nodes=nodes, why=self.why if nodes else short)

    def to_message(self) -> DecisionMessage:
        """As a message."""
        return DecisionMessage(self.mode.value, self.why, self.nodes, self.waited_s, self.chosen, self.other)
