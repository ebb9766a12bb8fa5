"""Virtual time: a clock, models whose forwards only note what they would take, and drafters that work while
the verifier's time passes.

Knows messages, steps and seconds; not what is verified, and not what is compared.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from ssd_serve.drafter.inline import ChannelWithin
from ssd_serve.kernels.batch import Batch
from ssd_serve.messages import (
    Close,
    DrafterMessage,
    Growth,
    Hello,
    Message,
    Open,
    Outcome,
    Pause,
    Resync,
)
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.wrapped import WrappedModel

MESSAGE_S = 50e-6
"""What a message takes: about a unix socket's time there or back."""
_TICK_S = 1e-3


class Core(Protocol):
    """A drafter without its channel: `DrafterCore`, or what it is compared with."""

    def handle(self, message: DrafterMessage) -> list[DrafterMessage]:
        """Take one message of the verifier; returns what must be answered at once."""
        ...

    def step(self) -> list[Growth]:
        """One draft step; empty when there is nothing to do."""
        ...


class Clock:
    """The verifier's time in seconds. `advance` lets the drafter work until then."""

    def __init__(self) -> None:
        self.now = 0.0
        self._others: list[Callable[[float], object]] = []

    def __call__(self) -> float:
        """Now."""
        return self.now

    def join(self, work_until: Callable[[float], object]) -> None:
        """Somebody else works while this clock advances."""
        self._others.append(work_until)

    def advance(self, end: float) -> None:
        """Let time pass until `end`."""
        for work_until in self._others:
            work_until(end)
        self.now = max(self.now, end)


class TimedModel(WrappedModel):
    """A model that adds up what its forwards would take: `step_s` up to `flat_rows` rows, then in
    proportion."""

    def __init__(self, model: Model, step_s: float, flat_rows: int) -> None:
        super().__init__(model)
        self._step_s = step_s
        self._flat_rows = flat_rows
        self._seconds = 0.0
        self.forwards = 0
        self.rows = 0

    def forward(self, batch: Batch) -> ForwardResult:
        """Forward now; its time is only noted."""
        self._seconds += self._step_s * max(1.0, batch.rows / self._flat_rows)
        self.forwards += 1
        self.rows += batch.rows
        return self._model.forward(batch)

    def take_seconds(self) -> float:
        """Seconds noted since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class VirtualChannel(ChannelWithin):
    """The verifier's end of a channel to a drafter whose device works while the verifier's time passes."""

    def __init__(self, clock: Clock, core: Core, model: TimedModel, hello: Hello) -> None:
        super().__init__()
        self._clock = clock
        self._core = core
        self._model = model
        self._to_drafter: list[tuple[float, DrafterMessage]] = []
        self._to_verifier: list[tuple[float, Message]] = [(0.0, hello)]
        self._free_at = 0.0
        self.steps = 0
        clock.join(self.work_until)

    def send(self, message: Message) -> bool:
        """It arrives a little later, when the drafter has finished its step."""
        if isinstance(message, Open | Outcome | Close | Resync | Pause):
            self._to_drafter.append((self._clock.now + MESSAGE_S, message))
        return not self.closed

    def receive(self) -> list[Message]:
        """What has arrived by now."""
        arrived = [message for at, message in self._to_verifier if at <= self._clock.now]
        self._to_verifier = [entry for entry in self._to_verifier if entry[0] > self._clock.now]
        return arrived

    def wait(self, timeout_s: float) -> bool:
        """Let time pass until something arrives; as in a poll, for whole milliseconds."""
        return await_first(self._clock, [self], timeout_s)

    @property
    def arrives_at(self) -> float:
        """When the first message that the verifier has not received arrives."""
        return min((at for at, _ in self._to_verifier), default=math.inf)

    @property
    def free_at(self) -> float:
        """When the drafter begins its next step, or looks for messages."""
        return self._free_at

    def work_until(self, end: float) -> None:
        """Every step that begins before `end`."""
        while self._free_at < end:
            self.act(end)

    def act(self, end: float) -> None:
        """Hear what has come, then one step, or be idle until something comes or `end`."""
        heard = [message for at, message in self._to_drafter if at <= self._free_at]
        self._to_drafter = self._to_drafter[len(heard) :]  # they arrive in the order of sending
        for message in heard:
            self._say(self._core.handle(message))
        growth = self._core.step()
        seconds = self._model.take_seconds()
        if seconds:
            self.steps += 1
            self._free_at += seconds
        elif not growth:
            comes = self._to_drafter[0][0] if self._to_drafter else math.inf
            self._free_at = min(end, max(self._free_at, comes))
        self._say(growth)

    def _say(self, messages: Sequence[Message]) -> None:
        self._to_verifier += [(self._free_at + MESSAGE_S, message) for message in messages]


def await_first(clock: Clock, channels: Sequence[VirtualChannel], timeout_s: float) -> bool:
    """Let time pass until something arrives at one of the channels; as in a poll, for whole milliseconds.

    Whoever is behind goes first, so that none works in a future of which another's message decides.
    """
    end = clock.now + math.ceil(timeout_s / _TICK_S) * _TICK_S
    while True:
        first = min((channel.arrives_at for channel in channels), default=math.inf)
        until = min(first, end)
        next_one = min(channels, key=lambda channel: channel.free_at, default=None)
        if next_one is None or next_one.free_at + MESSAGE_S >= until:
            clock.now = max(clock.now, until)
            return first <= end
        next_one.act(until)
