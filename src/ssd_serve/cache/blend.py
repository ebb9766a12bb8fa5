"""One estimate from those of several draft sources that have named candidates of the same node.

A mixture, whose weights follow from whose estimates the target's choices bear out (online expectation
maximisation): a source that is sure and wrong beside another takes few rows away from it. Knows tokens and
log-probabilities; no nodes, and not who the sources are.
"""

import math
from collections.abc import Collection, Mapping

Estimates = Mapping[int, Mapping[int, float]]
"""By source, as a bit: log-probabilities of the candidates that it has named."""
_PRIOR = 2.0
"""Choices that each source has borne out before anything is known, as it were."""
_MEMORY = 64.0
"""Choices that are remembered, about."""
_LEAST = 1e-300


class SourceWeights:
    """How much each source counts where several have named candidates: of one request, since it began."""

    def __init__(self) -> None:
        self._borne_out: dict[int, float] = {}

    def share(self, source: int, sources: Collection[int]) -> float:
        """The weight of one of these sources; theirs sum to 1."""
        counts = {each: self._borne_out.get(each, _PRIOR) for each in sources}
        return counts[source] / sum(counts.values())

    def observe(self, estimates: Estimates, token: int) -> None:
        """The target chose `token` where several had named candidates; tells nothing where none named it."""
        named = {
            source: self.share(source, estimates) * math.exp(values[token])
            for source, values in estimates.items()
            if token in values
        }
        whole = sum(named.values())
        if not whole:
            return
        for source in estimates:
            count = self._borne_out.get(source, _PRIOR) * (1 - 1 / _MEMORY)
            self._borne_out[source] = count + named.get(source, 0.0) / whole


def better(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """What one source has said twice: of a token that it has named again the better estimate."""
    return {**one, **{token: max(value, one.get(token, value)) for token, value in other.items()}}


def blend(estimates: Estimates, weights: SourceWeights) -> dict[int, float]:
    """The mixture's log-probabilities, by token."""
    sums: dict[int, float] = {}
    for source, values in estimates.items():
        share = weights.share(source, estimates)
        for token, value in values.items():
            sums[token] = sums.get(token, 0.0) + share * math.exp(value)
    return {token: math.log(max(value, _LEAST)) for token, value in sums.items()}
