"""Drafters of the losslessness proof: some behave, others talk nonsense or die.

They stand behind channels in memory and work when they are waited for, so that nothing depends on time.
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

_RULES_HOLD = 64
"""So many outcomes are answered with nonsense that follows the rules of messages."""


@dataclass(frozen=True, slots=True)
class RigDraft:
    """A draft that is loaded: what its drafter says first, and a fresh core of it, one at a time."""

    hello: Hello
    core: Callable[[], DrafterCore]


class MemoryDrafter:
    """A drafter at the other end of a memory channel; it works while it is waited for and once a round."""

    def __init__(self, draft: RigDraft, engine: Engine) -> None:
        self._core = draft.core()
        self._its = connect(engine, draft.hello, self.work)

    @property
    def hung_up(self) -> bool:
        """Whether the engine does not want it any more."""
        return self._its.closed

    def heard(self) -> Sequence[Message]:
        """What has come."""
        return self._its.receive()

    def work(self) -> None:
        """Drain, one step, publish."""
        for message in self.heard():
            if isinstance(message, Open | Outcome | Features | Close | Resync | Pause):
                for reply in self._core.handle(message):
                    self._its.send(reply)
        for growth in self._core.step():
            self._its.send(growth)

    def die(self) -> None:
        """Be gone, without a word."""
        self._its.close()


class GarbageDrafter:
    """Knows the roots and invents the rest: random candidates and impossible tokens. In the end it breaks the
    rules of messages too, for which it is hung up on."""

    def __init__(self, hello: Hello, engine: Engine) -> None:
        self._vocabulary = hello.vocabulary
        self._random = 1
        self._invented = 0
        self._its = connect(engine, hello, self.work)

    def work(self) -> None:
        """Answer every message with nonsense."""
        for message in self._its.receive():
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
            self._its.send(pack(request, epoch, sequence, each, "garbage", snapshot=False))
        self._invented += 1
        if self._invented == _RULES_HOLD:
            self._its.send(pack(request, epoch, 2, infinite, "garbage", snapshot=False))
            self._its.send(Growth(request, epoch, 99, b"123", b"1", b"", b"xyz", b""))

    def _tokens(self) -> list[int]:
        tokens: list[int] = []
        for _ in range(3):
            self._random = mix(self._random, 7)
            tokens.append(self._random % self._vocabulary)
        return [*tokens, tokens[0]]


def connect(engine: Engine, hello: Hello, work: Callable[[], object]) -> MemoryChannel:
    """Join `engine`; `work` is called when it waits. Returns the drafter's end."""
    mine, its = memory_pair()
    its.send(hello)
    mine.on_wait = work
    engine.drafters.connect(mine)
    return its
