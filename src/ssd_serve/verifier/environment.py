"""What a verifier hears from outside: clocks, measurements, the target's forwards, and drafters.

Everything else that it does follows from its settings, its weights and its requests: whoever listens here can
record a session, and whoever answers here can run it again. Knows the parts that listen; assembles nothing.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ssd_serve.transport.channel import Channel
from ssd_serve.transport.channel import poll
from ssd_serve.base.errors import RecordingError
from ssd_serve.models.interface import Model
from ssd_serve.verifier.drafts.drafters import Tap, untapped
from ssd_serve.verifier.observer import Observer
from ssd_serve.base.cost import Timing


@dataclass(frozen=True, slots=True)
class MeasuredStart:
    """What a verifier finds out while it starts, about this machine at this moment."""

    slots: int
    timings: dict[str, list[Timing]]
    """What forwards cost, by the cores or the device that compute them."""
    gains: dict[int, dict[str, float]]
    """What each layout gave in earlier sessions, by the level of load."""

    def timings_on(self, device: str) -> list[Timing]:
        """What forwards cost there."""
        if device not in self.timings:
            raise RecordingError(f"the recording does not say what forwards cost on {device}")
        return self.timings[device]


def _unwrapped(model: Model) -> Model:
    return model


@dataclass(frozen=True, slots=True)
class Environment:
    """The world as it is, where nothing else is given."""

    clock: Callable[[], float] = time.perf_counter
    """Seconds, from any moment."""
    poll: Callable[[Sequence[Channel], float], Sequence[Channel]] = poll
    tap: Tap = untapped
    """Stands before each drafter's channel."""
    model: Callable[[Model], Model] = _unwrapped
    """Stands before the target as rounds see it."""
    measured: MeasuredStart | None = None
    """None: it is measured."""
    drafts_inline: bool = True
    """Whether a draft model must be loaded where one drafts inline."""
    observer: Observer = field(default_factory=Observer)
