"""Virtual time for the real engine: a clock, rounds that take what they are said to take, and a channel to a
drafter that works while the verifier's time passes.

Knows messages, steps and seconds; not what is verified, and not what is compared.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ssd_serve.app.plan.forwards import Forward
from ssd_serve.base.draft_messages import (
    Close,
    DrafterMessage,
    Features,
    Growth,
    Hello,
    Message,
    Open,
    Outcome,
    Pause,
    Resync,
)
from ssd_serve.drafter.inline import InProcessChannel
from ssd_serve.models.interface import Model
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.verifier.round import InFlight, RequestStep, Rounds

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


@dataclass(frozen=True, slots=True)
class _Landing:
    """A forward that has been computed, and is over at `at` of the virtual clock."""

    clock: Clock
    at: float

    def ready(self) -> bool:
        """Always: nothing is listened for, because what arrives meanwhile is taken when it is over."""
        return True

    def wait(self) -> float:
        """Let time pass until then."""
        if self.clock.now < self.at:
            self.clock.advance(self.at)
        return self.at


class VirtualRounds(Rounds):
    """Rounds whose forwards take `forward_s` of their rows and contexts; before that the host takes `host_s`
    of their requests and nodes, or no time."""

    def __init__(
        self,
        model: Model,
        noise: NoiseRows,
        eos: tuple[int, ...],
        clock: Clock,
        forward_s: Callable[[Forward], float],
        host_s: Callable[[int, int], float] | None = None,
    ) -> None:
        super().__init__(model, noise, eos, clock=clock)
        self._virtual = clock
        self._forward_s = forward_s
        self._host_s = host_s

    def launch(self, work: Sequence[RequestStep]) -> InFlight:
        if self._host_s is not None:
            nodes = sum(len(each.tree) for each in work)
            self._virtual.advance(self._virtual.now + self._host_s(len(work), nodes))
        flight = super().launch(work)
        decoding = sum(each.wanted for each in work)
        reading = flight.reading
        forward = Forward(flight.rows, flight.rows - decoding, reading.context, reading.row_context)
        landing = _Landing(self._virtual, flight.started + self._forward_s(forward))
        return replace(flight, result=replace(flight.result, completion=landing))


class Timed(Protocol):
    """What adds up the seconds that a drafter's steps take."""

    def take_seconds(self) -> float:
        """Seconds noted since the last call."""
        ...


class StepTimes:
    """Adds up steps that take `step_s` each."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._seconds = 0.0

    def add(self) -> None:
        """One more step."""
        self._seconds += self._step_s

    def take_seconds(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class VirtualChannel(InProcessChannel):
    """The verifier's end of a channel to a drafter whose device works while the verifier's time passes."""

    def __init__(
        self, clock: Clock, core: Core, timed: Timed, hello: Hello, message_s: float = MESSAGE_S
    ) -> None:
        super().__init__()
        self.message_s = message_s
        self._clock = clock
        self._core = core
        self._timed = timed
        self._to_drafter: list[tuple[float, DrafterMessage]] = []
        self._to_verifier: list[tuple[float, Message]] = [(0.0, hello)]
        self._free_at = 0.0
        self.steps = 0
        self.messages = 0
        """Both ways."""
        clock.join(self.work_until)

    def send(self, message: Message) -> bool:
        """It arrives a little later, when the drafter has finished its step."""
        if isinstance(message, Open | Outcome | Features | Close | Resync | Pause):
            self._to_drafter.append((self._clock.now + self.message_s, message))
            self.messages += 1
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
        seconds = self._timed.take_seconds()
        if seconds:
            self.steps += 1
            self._free_at += seconds
        elif not growth:
            comes = self._to_drafter[0][0] if self._to_drafter else math.inf
            self._free_at = min(end, max(self._free_at, comes))
        self._say(growth)

    def _say(self, messages: Sequence[Message]) -> None:
        self._to_verifier += [(self._free_at + self.message_s, message) for message in messages]
        self.messages += len(messages)


def await_first(clock: Clock, channels: Sequence[VirtualChannel], timeout_s: float) -> bool:
    """Let time pass until something arrives at one of the channels; as in a poll, for whole milliseconds.

    Whoever is behind goes first, so that none works in a future of which another's message decides.
    """
    end = clock.now + math.ceil(timeout_s / _TICK_S) * _TICK_S
    while True:
        first = min((channel.arrives_at for channel in channels), default=math.inf)
        until = min(first, end)
        next_one = min(channels, key=lambda channel: channel.free_at, default=None)
        if next_one is None or next_one.free_at + next_one.message_s >= until:
            clock.now = max(clock.now, until)
            return first <= end
        next_one.act(until)
