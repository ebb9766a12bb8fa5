"""The drafter inside the verifier's own process and device: synchronous speculation (`sd`).

The same core as in a process of its own, behind the same channel interface: a draft step is run whenever the
verifier waits. Knows no sockets.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from ssd_serve.base.draft_messages import (
    Close,
    DrafterMessage,
    Features,
    Growth,
    Heartbeat,
    Hello,
    Message,
    Open,
    Outcome,
    Pause,
    Resync,
)
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.step_time import StepTime


class InProcessChannel(ABC):
    """What channels without a socket have in common: messages are sent one by one, and nothing queues."""

    def __init__(self) -> None:
        self._closed = False

    @abstractmethod
    def send(self, message: Message) -> bool:
        """Send a message; whether the channel is open."""

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def pending(self) -> int:
        """Always 0: there is no queue."""
        return 0

    def post(self, message: Message) -> bool:
        """The same as `send`."""
        return self.send(message)

    def flush(self) -> bool:
        """Nothing is ever pending."""
        return True

    def fileno(self) -> int:
        """There is no descriptor."""
        return -1

    def close(self) -> None:
        """Stop."""
        self._closed = True


class InlineChannel(InProcessChannel):
    """The verifier's end of a channel to a core in the same thread."""

    def __init__(
        self, core: DrafterCore, hello: Hello, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__()
        self._core = core
        self._clock = clock
        self._inbox: list[DrafterMessage] = [hello]
        self._step_time = StepTime(hello.step_ms / 1e3)
        self.steps = 0

    def send(self, message: Message) -> bool:
        """Handle the message now."""
        if isinstance(message, Open | Outcome | Features | Close | Resync | Pause):
            self._inbox.extend(self._core.handle(message))
        return not self.closed

    def receive(self) -> list[Message]:
        """What the core has said since the last call."""
        messages: list[Message] = list(self._inbox)
        self._inbox.clear()
        return messages

    def wait(self, timeout_s: float) -> bool:
        """Run one draft step, unless something is waiting already."""
        del timeout_s
        if self._inbox:
            return True
        started = self._clock()
        growth = self.draft()
        self._inbox.extend(growth)
        if growth:
            self.steps += 1
            if not self._core.is_warmup_step:
                self._step_time.observe(self._clock() - started)
            self._inbox.append(Heartbeat(step_ms=1e3 * self._step_time.seconds, nodes=self._core.nodes))
        return bool(growth)

    def draft(self) -> list[Growth]:
        """What one wait is for: a draft step, and all of a text that it has to read before."""
        growth = self._core.step()
        while not growth and self._core.reading:
            growth = self._core.step()
        return growth
