"""Several drafters in virtual time, and the processor time that they cost the verifier's host.

Messages are encoded and decoded as on a socket. What models and drafters compute, and what sending costs the
drafters, is taken off that time; system calls are not made. Knows how things are put together, not what
is compared.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from msgspec.structs import replace

from lab.virtual.rig import DRAFT_SLOTS, TREE_NODES, TimedModel, TimedPair
from ssd_serve.cluster.channels.framing import FrameReader, FrameWriter
from ssd_serve.draft_messages import (
    DrafterMessage,
    Growth,
    Hello,
    Message,
)
from ssd_serve.drafter.build import CoreParts, build_core
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.sources.whole_model import DraftModel
from ssd_serve.kernels.batch import Batch
from ssd_serve.logs import get_logger
from ssd_serve.messages import VerifierReport
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.wrapped import WrappedModel
from ssd_serve.plan.virtual_time import Clock, Core, VirtualChannel, VirtualRounds, await_first
from ssd_serve.verifier.drafts.drafters import Drafters
from ssd_serve.verifier.engine import Engine
from ssd_serve.verifier.planning.growth import WhenItPays
from ssd_serve.verifier.request import Request

Value = TypeVar("Value")


class NotHost:
    """Seconds of this thread that are none of the verifier's host."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def of(self, work: Callable[[], Value]) -> Value:
        """Do it, and count what it takes."""
        started = time.thread_time()
        try:
            return work()
        finally:
            self.seconds += time.thread_time() - started


class Host:
    """Seconds of this thread in some part of the verifier's host."""

    def __init__(self, not_host: NotHost) -> None:
        self.seconds = 0.0
        self._not_host = not_host

    def of(self, work: Callable[[], Value]) -> Value:
        """Do it, and count what it takes, less what is not the host's."""
        before, started = self._not_host.seconds, time.thread_time()
        try:
            return work()
        finally:
            self.seconds += time.thread_time() - started - (self._not_host.seconds - before)


class _Computing(WrappedModel):
    def __init__(self, model: Model, not_host: NotHost) -> None:
        super().__init__(model)
        self._not_host = not_host

    def forward(self, batch: Batch) -> ForwardResult:
        return self._not_host.of(lambda: self._model.forward(batch))


class _Elsewhere:
    """A core whose time is not the verifier's."""

    def __init__(self, core: Core, not_host: NotHost) -> None:
        self._core = core
        self._not_host = not_host

    def handle(self, message: DrafterMessage) -> list[DrafterMessage]:
        return self._not_host.of(lambda: self._core.handle(message))

    def step(self) -> list[Growth]:
        return self._not_host.of(self._core.step)


class WireChannel(VirtualChannel):
    """A channel whose messages are encoded and decoded, as those of a socket are."""

    def __init__(self, clock: Clock, core: Core, model: TimedModel, hello: Hello, not_host: NotHost) -> None:
        super().__init__(clock, _Elsewhere(core, not_host), model, hello)
        self._not_host = not_host
        self._mine, self._theirs = FrameWriter(), FrameWriter()
        self._reader = FrameReader()

    def send(self, message: Message) -> bool:
        self._mine.encode(message)
        return super().send(message)

    def receive(self) -> list[Message]:
        messages = super().receive()
        for frame in self._not_host.of(lambda: [bytes(self._theirs.encode(each)) for each in messages]):
            self._reader.feed(frame)
        return self._reader.take()


class VirtualDrafters(Drafters):
    """Drafters that are waited for in virtual time; counts the candidates that replicas gain, and the host's
    time for messages, trees and sharing."""

    def __init__(self, hello: Hello, clock: Clock, not_host: NotHost) -> None:
        super().__init__(hello, clock, get_logger("bench", "warning"))
        self._virtual = clock
        self._not_host = not_host
        self._wires: list[WireChannel] = []
        self.host = Host(not_host)
        self.candidates = 0

    def add(self, wire: WireChannel) -> None:
        """A drafter joins."""
        self._wires.append(wire)
        self.connect(wire)

    def wait(self, timeout_s: float) -> bool:
        return await_first(self._virtual, self._wires, timeout_s)

    def drain(self, requests: Mapping[int, Request]) -> int:
        """Everything: a verifier listens while its device computes, where virtual time has one drain."""
        drain = super().drain
        before = self._not_host.of(lambda: _candidates(requests))
        grown = 0
        while more := self.host.of(lambda: drain(requests)):
            grown += more
        self.candidates += self._not_host.of(lambda: _candidates(requests)) - before
        return grown

    def outcome(self, request: Request) -> None:
        outcome = super().outcome
        self.host.of(lambda: outcome(request))

    def flush(self) -> None:
        self.host.of(super().flush)


def _candidates(requests: Mapping[int, Request]) -> int:
    return sum(len(each.replica.tree) for each in requests.values() if each.replica is not None)


class DraftedEngine:
    """An engine with a drafter for each of the draft models, all on one virtual clock."""

    def __init__(
        self, pair: TimedPair, drafts: Sequence[Model], together: int, width: int, candidates: int, depth: int
    ) -> None:
        self.clock, not_host = Clock(), NotHost()
        self.host = Host(not_host)
        self.drafters = VirtualDrafters(pair.hello(), self.clock, not_host)
        facts = pair.target.facts
        target = _Computing(pair.target, not_host)
        rounds = VirtualRounds(
            target, pair.noise(), facts.eos_token_ids, self.clock, pair.table.target.seconds
        )
        self.engine: Engine
        self.engine, _ = pair.engine(
            self.clock, WhenItPays(concurrent=True), width, rounds, self.drafters, together
        )
        limits = GrowthLimits(width, candidates, depth, TREE_NODES, context=facts.context)
        for place, draft in enumerate(drafts):
            model = TimedModel(draft, pair.table.draft)
            name = f"drafter-{place}"
            guesses = DraftModel(model, DRAFT_SLOTS, pair.noise())
            parts = CoreParts(guesses=guesses, limits=limits, ends=facts.eos_token_ids, name=name)
            hello = replace(pair.hello(), name=name)
            self.drafters.add(WireChannel(self.clock, build_core(parts), model, hello, not_host))

    def step(self) -> list[VerifierReport]:
        """One round of the engine."""
        return self.host.of(self.engine.step)
