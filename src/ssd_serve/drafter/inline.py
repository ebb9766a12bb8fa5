"""The drafter in the verifier's own process and device, for synchronous speculation.

It has the same core and channel interface as a drafter process; a draft step runs whenever the verifier
waits.
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
    """Base of channels without a socket: messages are processed one by one, and nothing is queued."""

    def __init__(self) -> None:
        self._closed = False

    @abstractmethod
    def send(self, message: Message) -> bool:
        """Send a message; False if the channel is closed."""

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def pending(self) -> int:
        return 0

    def post(self, message: Message) -> bool:
        return self.send(message)

    def flush(self) -> bool:
        return True

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self._closed = True


class InlineChannel(InProcessChannel):
    """The verifier's side of a channel to a core in the same thread."""

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
        """Process the message now."""
        if isinstance(message, Open | Outcome | Features | Close | Resync | Pause):
            self._inbox.extend(self._core.handle(message))
        return not self.closed

    def receive(self) -> list[Message]:
        """Messages of the core since the last call."""
        messages: list[Message] = list(self._inbox)
        self._inbox.clear()
        return messages

    def wait(self, timeout_s: float) -> bool:
        """Run one draft step, unless messages are waiting."""
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
        """Run one draft step, with all prefills before it."""
        growth = self._core.step()
        while not growth and self._core.prefilling:
            growth = self._core.step()
        return growth
