"""Is speculation still what it was? Acceptance against its own history, and drafts that never hit.

A wrong kernel or a broken draft changes no text: it only makes speculation useless, which nobody would
notice. Acceptance here is whether the likeliest guess was right, however many were verified beside it. Plain
Python; knows counts, not requests, and not what is done about it.
"""

from dataclasses import dataclass

from ssd_serve.base.messages import AcceptanceHealth

_SLOW, _FAST = 1 / 2048, 1 / 128
"""Weights of a round: history over some minutes, the present over some seconds."""
_SETTLED = 1024
"""Rounds of history before anything is compared with it."""
_COLLAPSED, _RECOVERED = 0.4, 0.7
"""Shares of the history's acceptance."""
_NEVER = 256
"""Rounds of the engine in which drafts gave nothing: no guess right, no root ready."""


@dataclass(slots=True)
class _Mean:
    weight: float
    value: float = 0.0
    rounds: int = 0

    def add(self, seen: float) -> None:
        self.rounds += 1
        self.value += max(self.weight, 1 / self.rounds) * (seen - self.value)


class AcceptanceMonitor:
    """Watches rounds of requests for which drafts were expected."""

    def __init__(self) -> None:
        self.health = AcceptanceHealth.GOOD
        self._history = _Mean(_SLOW)
        self._present = _Mean(_FAST)
        self._in_vain = 0
        self._gave = False

    def observe(self, right: bool | None, hit: bool) -> None:
        """One request's round: whether its likeliest guess was right (None: none was verified), and whether
        its new root was drafted."""
        self._gave = self._gave or hit or bool(right)
        if right is not None:
            self._present.add(right)
            if self.health is not AcceptanceHealth.COLLAPSED:  # a collapse must not become what is usual
                self._history.add(right)

    def judge(self, drafting: bool) -> None:
        """The end of a round of the engine, in which requests decoded; without drafting nothing is wrong with
        drafts."""
        if not drafting:
            self.health, self._in_vain = AcceptanceHealth.GOOD, 0
            return
        self._in_vain = 0 if self._gave else self._in_vain + 1
        self._gave = False
        self.health = self._judge()

    def _judge(self) -> AcceptanceHealth:
        if self._in_vain >= _NEVER:
            return AcceptanceHealth.NEVER_HITS
        if self._history.rounds < _SETTLED or self._history.value < 0.1:
            return AcceptanceHealth.GOOD
        least = _RECOVERED if self.health is AcceptanceHealth.COLLAPSED else _COLLAPSED
        return (
            AcceptanceHealth.COLLAPSED
            if self._present.value < least * self._history.value
            else AcceptanceHealth.GOOD
        )
