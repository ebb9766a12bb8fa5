"""Whoever looks on while a session runs: what an engine is asked to do, and what its rounds decide.

Knows the words that are said to an engine; does nothing about them.
"""

from collections.abc import Sequence
from enum import IntEnum

from ssd_serve.base.messages import ServerMessage
from ssd_serve.verifier.planning.decision import Decision
from ssd_serve.verifier.round import Walk


class Turn(IntEnum):
    """What the process loop makes an engine do."""

    STEP = 1
    DRAIN = 2
    BEAT = 3
    """Heartbeats to drafters."""


class Observer:
    """Is told everything and looks away; subclasses look."""

    def asked(self, what: ServerMessage | Turn) -> None:
        """The engine is about to do this."""

    def rests(self) -> None:
        """Nothing is asked for a while, or never again."""

    def decided(self, walks: Sequence[Walk], decision: Decision) -> None:
        """A round was decided and is about to be committed."""

    def short(self, reason: str) -> None:
        """The device had too little memory for a round, which was not decided."""
