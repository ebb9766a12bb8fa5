"""The scale that makes reach honest: fitted online, by temperature and depth.

The probability of a child is softmax(noisy score / scale). Outcomes tell which child was the truth; the scale
follows the gradient of its negative log-likelihood. Knows no trees and no models.
"""

import math

from ssd_serve.drafter.sources.contract import Candidates

_GREEDY_SCALE = 0.7
_SAMPLED_SCALE = 1.0
_RATE = 0.02
_LEAST, _MOST = 0.2, 5.0
_GROUP_OF = (0, 1, 2, 2, 3)
"""Which group each depth is in; all deeper ones are in the last."""
_GROUPS = range(_GROUP_OF[-1] + 1)
DEEPEST = len(_GROUP_OF) - 1
_KNOWN = 64
"""Outcomes from which on a group goes by what it has seen itself."""


class Calibration:
    """Scales by temperature band (greedy, up to 0.85, above) and by the depth below the root at which a node
    was expanded. Start values: design section 3, as measured; a depth that is hardly known yet takes the one
    above it."""

    def __init__(self) -> None:
        start = {0: _GREEDY_SCALE, 1: _SAMPLED_SCALE, 2: _SAMPLED_SCALE}
        self._own = {band: [scale] * len(_GROUPS) for band, scale in start.items()}
        self._seen = {band: [0] * len(_GROUPS) for band in start}
        self._scales = {band: self._by_depth(band) for band in start}

    def scale(self, temperature: float, depth: int = 0) -> float:
        """The scale to divide noisy scores by, of candidates of a node so deep."""
        return self.scales(temperature)[min(depth, DEEPEST)]

    def scales(self, temperature: float) -> list[float]:
        """The scales of depths 0 to `DEEPEST`; all deeper ones have the last."""
        return self._scales[temperature_band(temperature)]

    def observe(self, temperature: float, candidates: Candidates, token: int, depth: int = 0) -> None:
        """The target chose `token` where `candidates` of a node so deep were ranked.

        d/d(log scale) of -log softmax(s / scale)[truth] is (s[truth] - E[s]) / scale. A truth outside the
        ranked children scores at most as much as the last of them; that bound stands in for it.
        """
        band, depth = temperature_band(temperature), min(depth, DEEPEST)
        ranks = (candidates.tokens == token).nonzero()[0]
        index = int(ranks[0]) if len(ranks) else len(candidates.scores) - 1
        score = float(candidates.scores[index])
        scale = self._scales[band][depth]
        gradient = (score - candidates.expected_score) / scale
        step = _RATE * max(-4.0, min(4.0, gradient))
        group = _GROUP_OF[depth]
        self._own[band][group] = max(_LEAST, min(_MOST, scale * math.exp(-step)))
        self._seen[band][group] += 1
        self._scales[band] = self._by_depth(band)

    def _by_depth(self, band: int) -> list[float]:
        own, seen = self._own[band], self._seen[band]
        known = [max(g for g in range(group + 1) if not g or seen[g] >= _KNOWN) for group in _GROUPS]
        return [own[known[group]] for group in _GROUP_OF]


def temperature_band(temperature: float) -> int:
    """0: greedy, 1: up to 0.85, 2: above."""
    if temperature <= 0:
        return 0
    return 1 if temperature <= 0.85 else 2
