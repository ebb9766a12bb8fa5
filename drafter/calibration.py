"""The scale that makes reach honest: fitted online, one for each band of temperature.

The probability of a child is softmax(noisy score / scale). Outcomes tell which child was the truth; the scale
follows the gradient of its negative log-likelihood. Knows no trees and no models.
"""

import math

from ssd_serve.drafter.sources.contract import Candidates

_GREEDY_SCALE = 0.7
_SAMPLED_SCALE = 1.0
_RATE = 0.02
_LEAST, _MOST = 0.2, 5.0


class Calibration:
    """Scales by temperature band: greedy, up to 0.85, above. Start values: design section 3, as measured."""

    def __init__(self) -> None:
        self._scales = {0: _GREEDY_SCALE, 1: _SAMPLED_SCALE, 2: _SAMPLED_SCALE}

    def scale(self, temperature: float) -> float:
        """The scale to divide noisy scores by."""
        return self._scales[temperature_band(temperature)]

    def observe(self, temperature: float, candidates: Candidates, token: int) -> None:
        """The target chose `token` where `candidates` were ranked.

        d/d(log scale) of -log softmax(s / scale)[truth] is (s[truth] - E[s]) / scale. A truth outside the
        ranked children scores at most as much as the last of them; that bound stands in for it.
        """
        band = temperature_band(temperature)
        ranks = (candidates.tokens == token).nonzero()[0]
        index = int(ranks[0]) if len(ranks) else len(candidates.scores) - 1
        score = float(candidates.scores[index])
        scale = self._scales[band]
        gradient = (score - candidates.expected_score) / scale
        step = _RATE * max(-4.0, min(4.0, gradient))
        self._scales[band] = max(_LEAST, min(_MOST, scale * math.exp(-step)))


def temperature_band(temperature: float) -> int:
    """0: greedy, 1: up to 0.85, 2: above."""
    if temperature <= 0:
        return 0
    return 1 if temperature <= 0.85 else 2
