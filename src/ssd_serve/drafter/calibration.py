"""The scale that calibrates candidates' probabilities, fitted online by temperature and depth.

The probability of a child is softmax(noisy score / scale). Each outcome shows which child the target chose;
the scale follows the gradient of its negative log-likelihood. Knows no trees and no models.
"""

import math

from ssd_serve.drafter.sources.contract import Candidates

_GREEDY_SCALE = 0.7
_SAMPLED_SCALE = 1.0
_RATE = 0.02
_LEAST, _MOST = 0.2, 5.0
_GROUP_OF = (0, 1, 2, 2, 3)
"""The group of each depth; deeper levels are in the last group."""
_GROUPS = range(_GROUP_OF[-1] + 1)
DEEPEST = len(_GROUP_OF) - 1
_KNOWN = 64
"""Outcomes after which a group uses its own scale."""
UNIT_SCALES: tuple[tuple[float, ...], ...] = ((1.0,),) * (DEEPEST + 1)
"""`Calibration.scales` of sources that are not calibrated."""


class Calibration:
    """Scales by temperature band (greedy, up to 0.85, above) and by depth below the root.

    Start values were measured (0.7 for greedy, 1.0 for sampled requests). A group with few outcomes uses the
    scale of the group above it.
    """

    def __init__(self) -> None:
        start = {0: _GREEDY_SCALE, 1: _SAMPLED_SCALE, 2: _SAMPLED_SCALE}
        self._own = {band: [scale] * len(_GROUPS) for band, scale in start.items()}
        self._seen = {band: [0] * len(_GROUPS) for band in start}
        self._scales = {band: self._by_depth(band) for band in start}

    def scale(self, temperature: float, depth: int = 0) -> float:
        """The divisor of noisy scores for candidates of a node at this depth."""
        return self.scales(temperature)[min(depth, DEEPEST)][0]

    def scales(self, temperature: float) -> tuple[tuple[float, ...], ...]:
        """Return, for each depth from 0 to `DEEPEST`, the scales of that depth and of all deeper ones."""
        return self._scales[temperature_band(temperature)]

    def observe(self, temperature: float, candidates: Candidates, token: int, depth: int = 0) -> None:
        """Update the scale after the target chose `token` among `candidates` of a node at this depth.

        d/d(log scale) of -log softmax(s / scale)[choice] is (s[choice] - E[s]) / scale. A choice outside the
        candidates scores at most as much as the last candidate, so the last score is used.
        """
        band, depth = temperature_band(temperature), min(depth, DEEPEST)
        ranks = (candidates.tokens == token).nonzero()[0]
        index = int(ranks[0]) if len(ranks) else len(candidates.scores) - 1
        score = float(candidates.scores[index])
        scale = self._scales[band][depth][0]
        gradient = (score - candidates.expected_score) / scale
        step = _RATE * max(-4.0, min(4.0, gradient))
        group = _GROUP_OF[depth]
        self._own[band][group] = max(_LEAST, min(_MOST, scale * math.exp(-step)))
        self._seen[band][group] += 1
        self._scales[band] = self._by_depth(band)

    def _by_depth(self, band: int) -> tuple[tuple[float, ...], ...]:
        own, seen = self._own[band], self._seen[band]
        known = [max(g for g in range(group + 1) if not g or seen[g] >= _KNOWN) for group in _GROUPS]
        scales = tuple(own[known[group]] for group in _GROUP_OF)
        return tuple(scales[depth:] for depth in range(len(scales)))


def temperature_band(temperature: float) -> int:
    """0: greedy, 1: up to 0.85, 2: above."""
    if temperature <= 0:
        return 0
    return 1 if temperature <= 0.85 else 2
