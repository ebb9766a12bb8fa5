"""What a round decided about drafts, and why: the one answer to "why does it not speculate now?".

A value that those who decide fill in. Knows no trees, no drafters and no governor.
"""

from dataclasses import dataclass, replace

from ssd_serve.base.messages import Decided, Price, Why
from ssd_serve.verifier.planning.layout import Layout


@dataclass(frozen=True, slots=True)
class Decision:
    """One round's. `chosen` is what it should give as it was chosen, `other` what the other way should give:
    no nodes for a round with nodes, one node for a round in which none was worth it, drafting for a layout
    without drafts. None: not known."""

    layout: Layout
    why: Why
    nodes: int
    """Verified, which memory may have made fewer than `chosen` says."""
    waited_s: float
    chosen: Price | None = None
    other: Price | None = None

    def launched(self, nodes: int, short: Why) -> "Decision":
        """With so many nodes in the end; `short` is why, where none is left of those that were chosen."""
        if nodes == self.nodes:
            return self
        return replace(self, nodes=nodes, why=self.why if nodes else short)

    def told(self) -> Decided:
        """As a message."""
        return Decided(self.layout.value, self.why, self.nodes, self.waited_s, self.chosen, self.other)
