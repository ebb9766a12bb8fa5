"""A lookup drafter in the verifier's own process, which needs no device and hardly any time.

It replies to a message at once, so the next round finds its draft tokens without waiting. It works together
with a drafter of any kind.
"""

import secrets
from collections.abc import Collection

from msgspec.structs import replace

from ssd_serve.base.draft_messages import (
    Close,
    DrafterMessage,
    Hello,
    Message,
    Open,
    Outcome,
    Pause,
    Resync,
)
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.names import as_label
from ssd_serve.base.setting_values import SUFFIX
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.grammar_paths import GrammarPaths
from ssd_serve.drafter.inline import InProcessChannel
from ssd_serve.drafter.sources.lookup import LOOKUP, LookupSource
from ssd_serve.drafter.sources.lookup_text import SharedHistory
from ssd_serve.sampling.grammar import Grammars

_FAN_OUT = 4


class PerRequestWidth:
    """A `StepWidth` of one node for each request with a new root."""

    def __init__(self) -> None:
        self.width = 0

    def observe(self, nodes: int, seconds: float) -> None:
        """No effect: time does not bound a step."""


class LookupChannel(InProcessChannel):
    """The verifier's side of a channel to a lookup over its requests' tokens."""

    def __init__(
        self,
        hello: Hello,
        limits: GrowthLimits,
        ends: Collection[int],
        shared: SharedHistory | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """`hello` has a step time of 0, which marks a source that needs no waiting.

        `ends` are EOS ids; `shared` is the history of other requests, which is searched too.
        """
        super().__init__()
        self._width = PerRequestWidth()
        self._source = LookupSource(limits.fan_out, shared)
        self._core = DrafterCore(
            self._source,
            limits,
            ends,
            hello.name,
            widths=self._width,
            paths=None if grammars is None else GrammarPaths(grammars),
            description=LOOKUP,
        )
        self._inbox: list[DrafterMessage] = [hello]
        self._moved = set[int]()

    def send(self, message: Message) -> bool:
        """Process the message; the lookup itself runs in `receive`."""
        if isinstance(message, Close):
            self._source.share(message.request)
        if isinstance(message, Open | Outcome | Close | Resync | Pause):
            self._inbox.extend(self._core.handle(message))
        if isinstance(message, Open):
            self._source.salt(message.request, message.salt)
        if isinstance(message, Open | Outcome):
            self._moved.add(message.request)
        return not self.closed

    def receive(self) -> list[Message]:
        """Messages, with draft tokens of the requests that have moved since the last call."""
        if self._moved:
            self._width.width = len(self._moved)
            self._moved.clear()
            self._inbox.extend(self._core.step())
        messages: list[Message] = list(self._inbox)
        self._inbox.clear()
        return messages

    def wait(self, timeout_s: float) -> bool:
        """True if there is anything to receive; waiting adds nothing."""
        del timeout_s
        return bool(self._inbox or self._moved)


def lookup_channel(
    name: str,
    config: EngineConfig,
    mine: Hello,
    ends: Collection[int],
    grammars: Grammars | None = None,
) -> LookupChannel:
    """The lookup drafter `name` for a verifier with the `Hello` `mine`."""
    hello = replace(
        mine, name=name, source=as_label(name), instance=secrets.randbits(63), step_ms=0.0, prefill_ms=0.0
    )
    limits = GrowthLimits(
        width=1,
        fan_out=min(_FAN_OUT, config.draft_fan_out),
        depth=2 * config.draft_depth,  # chains without branches
        nodes=config.tree_nodes,
        context=mine.context,
    )
    shared = SharedHistory(config.suffix_shared) if name == SUFFIX and config.suffix_shared else None
    return LookupChannel(hello, limits, ends, shared, grammars)
