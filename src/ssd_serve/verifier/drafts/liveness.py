"""Whether a drafter answers: when it was heard, when it was asked, and how often it says nothing that counts.

Knows messages by what they are worth; no requests, no channels and no other drafters.
"""

import math
from collections.abc import Callable

from ssd_serve.base.draft_messages import Heartbeat, Message, SharedMemoryRead
from ssd_serve.base.errors import ProtocolError
from ssd_serve.verifier.drafts.admission import check_figures

_SILENT_STEPS = 3
_SILENT_EXTRA_S = 0.020
_LAGGING_S, _LAGGING_STEPS = 1.0, 20
"""So long a silence means that a drafter does not keep up; a long prompt alone takes less."""
_GOOD_S = 2.0
"""For so long who lagged must do well: else its requests would go to and fro."""
_MAX_IDLE_WORDS = 20_000
"""Messages a second that change nothing; a request that ends leaves some hundreds on their way."""


class Liveness:
    """One drafter's. `synchronous`: it works only while it is waited for, so its silence means nothing."""

    def __init__(self, clock: Callable[[], float], synchronous: bool) -> None:
        self.step_s = 0.0
        self._clock = clock
        self._synchronous = synchronous
        self.heard_at = self._idle_since = clock()
        self._idle_words = 0
        self._asked_at = 0.0
        self._lagged_at = -math.inf

    @property
    def silent_s(self) -> float:
        """Seconds since the drafter last said anything."""
        return self._clock() - self.heard_at

    @property
    def _unanswered_s(self) -> float:
        """Seconds since it was first asked for what it has not answered."""
        return self._clock() - self._asked_at if self.heard_at < self._asked_at else 0.0

    @property
    def answers(self) -> bool:
        """Whether it has not been silent for 3 of its steps + 20 ms after it was asked."""
        return self._synchronous or self._unanswered_s < _SILENT_STEPS * self.step_s + _SILENT_EXTRA_S

    def lags(self, full: bool) -> bool:
        """Whether it does not keep up, or did not lately: it is silent for long, or its queue is `full`."""
        now = self._clock()
        if full or self._unanswered_s > _LAGGING_S + _LAGGING_STEPS * self.step_s:
            self._lagged_at = now
        return not self._synchronous and now - self._lagged_at < _GOOD_S

    def asked(self) -> None:
        """It has something to answer from now on, unless it has so already."""
        if self.heard_at >= self._asked_at:
            self._asked_at = self._clock()

    def heard(self, message: Message) -> None:
        """It has said something. That it has read is no answer to an outcome."""
        if isinstance(message, SharedMemoryRead):
            return
        self.heard_at = self._clock()
        if isinstance(message, Heartbeat):
            check_figures(message)
            self.said_nothing()
            if message.step_ms > 0:
                self.step_s = message.step_ms / 1e3

    def said_nothing(self) -> None:
        """Its last message has changed nothing. Raises `ProtocolError` where there are too many of them."""
        if self.heard_at - self._idle_since >= 1.0:
            self._idle_since, self._idle_words = self.heard_at, 0
        self._idle_words += 1
        if self._idle_words > _MAX_IDLE_WORDS:
            raise ProtocolError(f"it sends more than {_MAX_IDLE_WORDS} messages a second that mean nothing")
