"""Drafters as the verifier sees them, and requests that they may draft for."""

from msgspec.structs import replace

from ssd_serve.base.draft_messages import DrafterMessage, Growth, Heartbeat, Hello, Message
from ssd_serve.base.messages import SamplingParameters, Submit
from ssd_serve.bench.memory_channel import MemoryChannel, Schedule, memory_pair
from ssd_serve.cache.expansions import ROOT_STEP, Expansion, pack
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.inline import InlineChannel
from ssd_serve.verifier.drafters.pool import DrafterPool
from ssd_serve.verifier.engine import Engine
from ssd_serve.verifier.request import Request
from tests.fakes import HELLO, VOCABULARY, Case, FakeClock, make_core
from tests.verifier.scheduler_factory import request_of

OTHER = replace(HELLO, name="d1")


def connect_inline(engine: Engine, case: Case) -> None:
    """Connect a synchronous drafter in this process."""
    engine.drafters.connect(InlineChannel(make_core(case), HELLO), synchronous=True)


class CoreDrafter:
    """Drafter at the other end of a memory channel, which works while the engine waits for it."""

    def __init__(self, engine: Engine, core: DrafterCore, *schedules: Schedule) -> None:
        mine, self.its = memory_pair(*schedules)
        self._core = core
        self.its.send(HELLO)
        mine.on_wait = self.work
        engine.drafters.connect(mine)

    def work(self) -> None:
        """Handle received messages, send the replies, and run one draft step."""
        if self.its.closed:
            return
        for message in self.its.receive():
            if isinstance(message, DrafterMessage) and not isinstance(message, Hello | Heartbeat):
                for reply in self._core.handle(message):
                    self.its.send(reply)
        for growth in self._core.step():
            self.its.send(growth)


class DrafterHarness:
    """Drafters under test, some requests, and the far ends of the channels."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.drafters = DrafterPool(HELLO, self.clock)
        self.requests = {number: make_request(number) for number in range(2)}

    def join(self, hello: Hello = HELLO, capacity: int = 100, synchronous: bool = False) -> MemoryChannel:
        mine, its = memory_pair(capacity=capacity)
        self.drafters.connect(mine, synchronous)
        its.send(hello)
        self.drain()
        return its

    def drain(self) -> int:
        return self.drafters.drain(self.requests)

    def end_round(self) -> None:
        self.drafters.flush()
        self.drain()

    def commit(self, number: int, *tokens: int) -> None:
        request = self.requests[number]
        request.tokens.extend(tokens)
        assert request.replica is not None
        request.replica.advance(tokens)
        self.drafters.send_outcome(request)


def make_request(number: int) -> Request:
    submit = Submit(number, (1, 2, 3), SamplingParameters(max_tokens=50), 7)
    return request_of(submit, (0,), vocabulary=VOCABULARY)


def of(kind: type[Message], messages: list[Message]) -> list[Message]:
    return [message for message in messages if isinstance(message, kind)]


def growth(request: Request, sequence: int = 0, epoch: int | None = None) -> Growth:
    assert request.replica is not None
    expansion = Expansion(request.replica.tree.root.name, ROOT_STEP, [1, 2], [-0.5, -1.0])
    return pack(request.number, epoch or request.epoch, sequence, [expansion], "d0", snapshot=False)
