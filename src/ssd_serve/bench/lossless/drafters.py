"""Drafters of the losslessness proof: correct ones, one that sends garbage, and ones that die.

They are behind channels in memory and work while the engine waits, so that nothing depends on time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ssd_serve.base.draft_messages import (
    Close,
    Features,
    Growth,
    Hello,
    Message,
    Open,
    Outcome,
    Pause,
    Resync,
)
from ssd_serve.base.seeds import mix
from ssd_serve.bench.memory_channel import MemoryChannel, memory_pair
from ssd_serve.cache.expansions import ROOT_STEP, Expansion, pack
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.verifier.engine import Engine

_VALID_ANSWERS = 64
"""Number of garbage answers that follow the protocol, before one that does not."""


@dataclass(frozen=True, slots=True)
class RigDraft:
    """A loaded draft: the `Hello` of its drafter, and a factory of cores, one at a time."""

    hello: Hello
    core: Callable[[], DrafterCore]


class MemoryDrafter:
    """A drafter at the other end of a memory channel; it works while the engine waits and once a round."""

    def __init__(self, draft: RigDraft, engine: Engine) -> None:
        self._core = draft.core()
        self._channel = connect(engine, draft.hello, self.work)

    @property
    def disconnected(self) -> bool:
        """True if the engine has closed the connection."""
        return self._channel.closed

    def received(self) -> Sequence[Message]:
        """Return the messages that have arrived."""
        return self._channel.receive()

    def work(self) -> None:
        """Handle all messages, run one draft step, and send the expansions."""
        for message in self.received():
            if isinstance(message, Open | Outcome | Features | Close | Resync | Pause):
                for reply in self._core.handle(message):
                    self._channel.send(reply)
        for growth in self._core.step():
            self._channel.send(growth)

    def die(self) -> None:
        """Close the channel without a message."""
        self._channel.close()


class GarbageDrafter:
    """A drafter that sends random candidates and impossible tokens for the right roots.

    In the end it also violates the protocol, for which the engine disconnects it.
    """

    def __init__(self, hello: Hello, engine: Engine) -> None:
        self._vocabulary = hello.vocabulary
        self._random = 1
        self._invented = 0
        self._channel = connect(engine, hello, self.work)

    def work(self) -> None:
        """Answer every message with garbage."""
        for message in self._channel.receive():
            if isinstance(message, Outcome | Open):
                self._invent(message.request, message.epoch, message.root)

    def _invent(self, request: int, epoch: int, root: int) -> None:
        first, second = self._tokens(), self._tokens()
        wild = [
            Expansion(root, ROOT_STEP, first, [5.0, -1.0, -2.0, -2.0]),
            Expansion(root, first[0], second, [-0.1, -3e30, 3e30, -1.0]),
            Expansion(root ^ 5, 3, second, [0.0, 0.0, 0.0, 0.0]),
        ]
        impossible = [Expansion(root, ROOT_STEP, [-2, self._vocabulary], [0.0, 0.0])]
        infinite = [Expansion(root, ROOT_STEP, [1, 2], [float("inf"), float("nan")])]
        for sequence, each in enumerate((wild, impossible)):
            self._channel.send(pack(request, epoch, sequence, each, "garbage", snapshot=False))
        self._invented += 1
        if self._invented == _VALID_ANSWERS:
            self._channel.send(pack(request, epoch, 2, infinite, "garbage", snapshot=False))
            self._channel.send(Growth(request, epoch, 99, b"123", b"1", b"", b"xyz", b""))

    def _tokens(self) -> list[int]:
        tokens: list[int] = []
        for _ in range(3):
            self._random = mix(self._random, 7)
            tokens.append(self._random % self._vocabulary)
        return [*tokens, tokens[0]]


def connect(engine: Engine, hello: Hello, work: Callable[[], object]) -> MemoryChannel:
    """Connect a drafter; the engine calls `work` while it waits. Return the drafter's end of the channel."""
    engine_end, drafter_end = memory_pair()
    drafter_end.send(hello)
    engine_end.on_wait = work
    engine.drafters.connect(engine_end)
    return drafter_end
