"""How often what followed an earlier place follows again, by how many tokens the two places share.

Learnt while texts are written, for greedy and sampled ones apart. Knows counts, not texts.
"""

from dataclasses import dataclass, field

from ssd_serve.drafter.calibration import temperature_band
from ssd_serve.drafter.lookup.text import LONGEST

_MEMORY = 256.0
"""Guesses of one length that are remembered, about."""
_PRIOR = 8.0
"""Guesses that the start value weighs as much as."""
_HALF = 3.0
"""Tokens in common of which every other place should go on alike, before anything is known."""


@dataclass(slots=True)
class _Seen:
    right: float
    all: float = _PRIOR


def _nothing_seen() -> list[_Seen]:
    return [_Seen(_PRIOR * length / (length + _HALF)) for length in range(LONGEST + 1)]


@dataclass(frozen=True, slots=True)
class Trust:
    """By temperature band and shared tokens."""

    _bands: list[list[_Seen]] = field(default_factory=lambda: [_nothing_seen() for _ in range(3)])

    def share(self, temperature: float, length: int) -> float:
        """Probability that the text goes on as one of the places did, from above 0 to below 1."""
        seen = self._bands[temperature_band(temperature)][min(length, LONGEST)]
        return (seen.right + 0.05) / (seen.all + 0.1)

    def observe(self, temperature: float, length: int, right: bool) -> None:
        """One of them was right, or none."""
        seen = self._bands[temperature_band(temperature)][min(length, LONGEST)]
        if seen.all >= _MEMORY:
            seen.right *= 1 - 1 / _MEMORY
            seen.all *= 1 - 1 / _MEMORY
        seen.right += right
        seen.all += 1
