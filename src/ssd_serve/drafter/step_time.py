"""What a draft step takes, as drafters tell it to verifiers. Knows no steps, only their seconds."""

_BLEND = 0.1
_MAX_RATIO = 4.0
"""A step that a busy machine stretched further counts as stretched so far."""


class StepTime:
    """A running average. `seconds`: what a step took at start; 0: unknown."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def observe(self, seconds: float) -> None:
        """A step took `seconds`, host time included."""
        if not self.seconds:
            self.seconds = seconds
        self.seconds += _BLEND * (min(seconds, _MAX_RATIO * self.seconds) - self.seconds)
