"""Decision of a round about drafts, with its reason.

A value that planner and engine fill in. Knows no trees, no drafters and no controller.
"""

from dataclasses import dataclass, replace
from enum import Enum

from ssd_serve.base.messages import CostEstimate, DecisionMessage, DecisionReason


class SpeculationMode(Enum):
    """Mode of drafting: a drafter on its own device, one on the target's device in turns with it, or none."""

    ASYNC = "async"
    SYNC = "sync"
    PLAIN = "off"  # its name in /load, /metrics and files of gains


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision of one round. `chosen` is its estimate at the time of the choice; `other` is the estimate of
    the alternative; None: unknown. The alternative is no nodes for a round with nodes, one node for a round
    in which none paid, and drafting for plain decoding."""

    mode: SpeculationMode
    why: DecisionReason
    nodes: int
    """Verified nodes; fewer than `chosen` has if memory is short."""
    waited_s: float
    chosen: CostEstimate | None = None
    other: CostEstimate | None = None

    def launched(self, nodes: int, short: DecisionReason) -> "Decision":
        """Return the decision with the number of nodes that were launched; `short` is the reason if all
        chosen nodes were dropped."""
        if nodes == self.nodes:
            return self
        return replace(self, nodes=nodes, why=self.why if nodes else short)

    def to_message(self) -> DecisionMessage:
        return DecisionMessage(self.mode.value, self.why, self.nodes, self.waited_s, self.chosen, self.other)
