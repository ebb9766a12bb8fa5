"""Counts by depth, from histograms of depths: how often something came at least so deep.

A round that came to a depth was at every one above it. Position 0 is depth 1, as vLLM's metrics have it.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, zip_longest

POSITIONS = 16
"""Positions that are reported one by one; all deeper ones are reported as a sum."""


def added(histograms: Iterable[Sequence[int]]) -> list[int]:
    """Sum histograms, depth by depth."""
    return [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]


def by_position(histogram: Sequence[int]) -> list[int]:
    """Cumulative counts by position, the deepest last: rounds that reached at least that position.
    `histogram[n]` rounds ended at depth n."""
    return list(accumulate(reversed(histogram[1:])))[::-1]


def bounded(counts: Sequence[int]) -> list[int]:
    """The first `POSITIONS` of some counts by position, and the sum of all others."""
    first = [*counts[:POSITIONS], *[0] * (POSITIONS - len(counts))]
    return [*first, sum(counts[POSITIONS:])]


def rates(verified: Sequence[int], accepted: Sequence[int]) -> list[float]:
    """Acceptance rate by position, for at most `POSITIONS`: of the rounds that verified a node there, the
    share that accepted one. Arguments are histograms of depths."""
    pairs = zip_longest(by_position(verified), by_position(accepted), fillvalue=0)
    return [found / tried for tried, found in pairs if tried][:POSITIONS]
