"""Counts by depth, from histograms of depths: how often something came at least so deep.

A round that came to a depth was at every one above it. Position 0 is depth 1, as vLLM's metrics have it.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, zip_longest

POSITIONS = 16
"""Told one by one; all deeper ones are told together."""


def added(histograms: Iterable[Sequence[int]]) -> list[int]:
    """One histogram of several."""
    return [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]


def by_position(histogram: Sequence[int]) -> list[int]:
    """How many came to each position, the deepest last. `histogram[n]` came to depth n."""
    return list(accumulate(reversed(histogram[1:])))[::-1]


def bounded(counts: Sequence[int]) -> list[int]:
    """The first `POSITIONS` of some counts by position, and the sum of all others."""
    first = [*counts[:POSITIONS], *[0] * (POSITIONS - len(counts))]
    return [*first, sum(counts[POSITIONS:])]


def rates(verified: Sequence[int], accepted: Sequence[int]) -> list[float]:
    """By position: of the rounds that verified a node there (histogram `verified`), how many accepted one;
    for the first `POSITIONS` at most."""
    pairs = zip_longest(by_position(verified), by_position(accepted), fillvalue=0)
    return [found / tried for tried, found in pairs if tried][:POSITIONS]
