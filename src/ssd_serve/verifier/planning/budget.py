"""The budget: which nodes a round verifies, and whether to let the trees grow first.

Both are one question under the measured cost model: does it raise the expected committed tokens per second?
With a long-run rate `r` of tokens a second, time is worth `r` tokens a second (renewal reward): a node is
verified when its reach exceeds `r` times the time that its row adds, and growth is awaited when the tokens
that it should add exceed `r` times the wait. Plain numpy; knows no models and no messages.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """How many of the best nodes to verify, and the tokens and seconds that the round should take."""

    nodes: int
    tokens: float
    seconds: float
    held_back: bool = False
    """Whether more nodes would pay, but take longer than a token may."""


def choose(
    reaches: npt.NDArray[np.float64],
    roots: int,
    seconds: npt.NDArray[np.float64],
    rate: float,
    max_tpot_s: float = math.inf,
) -> NodeChoice:
    """Best number of nodes to verify beside `roots` roots.

    `reaches` [nodes] falls; `seconds` [most + 1], most <= nodes, is what the round takes with 0, 1, ... most
    nodes. `rate` is in tokens a second; 0 means unknown, then the round's own rate is maximised. Rounds in
    which a request's token takes longer than `max_tpot_s` are left out, unless all do: then the shortest is
    taken.
    """
    tokens = roots + np.concatenate(([0.0], np.cumsum(reaches[: len(seconds) - 1])))  # [most + 1]
    value = tokens - rate * seconds if rate > 0 else tokens / np.maximum(seconds, 1e-9)
    paying = 0
    if max_tpot_s < math.inf:
        paying = int(np.argmax(value))
        tpot_s = seconds * roots / np.maximum(tokens, 1e-9)
        kept = tpot_s <= max_tpot_s
        value = np.where(kept, value, -np.inf) if kept.any() else -tpot_s
    best = int(np.argmax(value))
    return NodeChoice(best, float(tokens[best]), float(seconds[best]), best < paying)


class Rate:
    """Long-run committed tokens a second, as an average that follows the number of decoding requests."""

    def __init__(self, memory: float = 0.05) -> None:
        self._memory = memory
        self._tokens_per_request = 0.0
        self._seconds = 0.0

    def observe(self, requests: int, tokens: float, seconds: float) -> None:
        """A round of `requests` decoding requests committed `tokens` tokens in `seconds`, waits included."""
        if requests == 0 or seconds <= 0:
            return
        each = tokens / requests
        if self._seconds == 0.0:
            self._tokens_per_request, self._seconds = each, seconds
            return
        self._tokens_per_request += self._memory * (each - self._tokens_per_request)
        self._seconds += self._memory * (min(seconds, 3 * self._seconds) - self._seconds)

    @property
    def tokens_a_round(self) -> float:
        """Committed tokens of a request in a round; 1 while unknown."""
        return max(1.0, self._tokens_per_request)

    @property
    def seconds_a_round(self) -> float:
        """Seconds of a round; 0 while unknown."""
        return self._seconds

    def value(self, requests: int) -> float:
        """Tokens a second with `requests` decoding requests; 0 while unknown."""
        return self._tokens_per_request * requests / self._seconds if self._seconds else 0.0


class GrowthGain:
    """How many expected tokens one draft step adds, as a share of the reach of the leaves that it can
    expand."""

    def __init__(self, share: float = 0.6) -> None:
        self._prior = share
        self.share = share

    def expected(self, leaf_reaches: npt.NDArray[np.float64]) -> float:
        """Tokens that expanding these leaves should add to the round."""
        return self.share * float(leaf_reaches.sum())

    def forget(self) -> None:
        """Nothing was awaited: drift to the prior, so that one bad time does not end waiting for ever."""
        self.share += 0.02 * (self._prior - self.share)

    def observe(self, leaf_reach: float, added: float) -> None:
        """Leaves of total reach `leaf_reach` were awaited; the round's expected tokens rose by `added`."""
        if leaf_reach > 0.05:
            self.share += 0.1 * (min(1.5, max(0.05, added / leaf_reach)) - self.share)
