"""Drafters in the verifier's own process: a draft on its device for synchronous speculation, and lookup.

They have the same core and channel interface as a drafter process. An inline draft step runs whenever the
verifier waits. A lookup needs hardly any time and replies at once, so the next round finds its draft tokens
without waiting; it works together with a drafter of any kind.
"""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from msgspec.structs import replace

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
from ssd_serve.base.engine_config import SUFFIX, EngineConfig
from ssd_serve.base.names import as_label
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.grammar_paths import GrammarPaths
from ssd_serve.drafter.sources.lookup import LOOKUP, LookupSource, SharedHistory
from ssd_serve.drafter.step_time import StepTime
from ssd_serve.sampling.grammar import Grammars


class InProcessChannel(ABC):
    """The verifier's side of a channel to a core in the same thread, without a socket.

    Messages are processed one by one, and nothing is queued.
    """

    def __init__(self, core: DrafterCore, hello: Hello) -> None:
        self._core = core
        self._inbox: list[DrafterMessage] = [hello]
        self._closed = False

    def send(self, message: Message) -> bool:
        """Process the message now; False if the channel is closed."""
        if isinstance(message, Open | Outcome | Features | Close | Resync | Pause):
            self._inbox.extend(self._core.handle(message))
        return not self._closed

    def receive(self) -> list[Message]:
        """Messages of the core since the last call."""
        messages: list[Message] = list(self._inbox)
        self._inbox.clear()
        return messages

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait for messages; False if there are none."""

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
    """A channel to a core with a draft model or head."""

    def __init__(
        self, core: DrafterCore, hello: Hello, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(core, hello)
        self._clock = clock
        self._step_time = StepTime(hello.step_ms / 1e3)
        self.steps = 0

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


_FAN_OUT = 4


class LookupChannel(InProcessChannel):
    """A channel to a lookup over its requests' tokens; the lookup itself runs in `receive`."""

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        verifier: Hello,
        ends: Collection[int],
        grammars: Grammars | None = None,
    ) -> None:
        """`verifier` is the `Hello` of the verifier; `ends` are EOS ids."""
        shared = SharedHistory(config.suffix_shared) if name == SUFFIX and config.suffix_shared else None
        self._source = LookupSource(min(_FAN_OUT, config.draft_fan_out), shared)
        self._moved = set[int]()
        limits = GrowthLimits(
            width=1,
            fan_out=min(_FAN_OUT, config.draft_fan_out),
            depth=2 * config.draft_depth,  # chains without branches
            nodes=config.tree_nodes,
            context=verifier.context,
        )
        paths = None if grammars is None else GrammarPaths(grammars)
        core = DrafterCore(self._source, limits, ends, name, paths=paths, description=LOOKUP)
        # A step time of 0 marks a source that needs no waiting.
        hello = replace(verifier, name=name, source=as_label(name), step_ms=0.0, prefill_ms=0.0)
        super().__init__(core, replace(hello, instance=secrets.randbits(63)))

    def send(self, message: Message) -> bool:
        if isinstance(message, Close):
            self._source.share(message.request)
        super().send(message)
        if isinstance(message, Open):
            self._source.salt(message.request, message.salt)
        if isinstance(message, Open | Outcome):
            self._moved.add(message.request)
        return not self.closed

    def receive(self) -> list[Message]:
        """Messages, with draft tokens of the requests that have moved since the last call."""
        if self._moved:
            self._inbox.extend(self._core.step(width=len(self._moved)))
            self._moved.clear()
        return super().receive()

    def wait(self, timeout_s: float) -> bool:
        """True if there is anything to receive; waiting adds nothing."""
        del timeout_s
        return bool(self._inbox or self._moved)
