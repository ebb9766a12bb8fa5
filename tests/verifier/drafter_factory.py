"""Drafters as the verifier sees them, and requests that they may draft for."""

from msgspec.structs import replace

from ssd_serve.base.draft_messages import Growth, Hello, Message
from ssd_serve.base.messages import SamplingParameters, Submit
from ssd_serve.bench.memory_channel import MemoryChannel, memory_pair
from ssd_serve.cache.expansions import ROOT_STEP, Expansion, pack
from ssd_serve.verifier.drafters.pool import DrafterPool
from ssd_serve.verifier.request import Request, create_request, shared_state
from tests.fakes import HELLO, VOCABULARY, FakeClock

OTHER = replace(HELLO, name="d1")


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
    return create_request(submit, shared_state(submit, (0,)), 64, VOCABULARY)


def of(kind: type[Message], messages: list[Message]) -> list[Message]:
    return [message for message in messages if isinstance(message, kind)]


def growth(request: Request, sequence: int = 0, epoch: int | None = None) -> Growth:
    assert request.replica is not None
    expansion = Expansion(request.replica.tree.root.name, ROOT_STEP, [1, 2], [-0.5, -1.0])
    return pack(request.number, epoch or request.epoch, sequence, [expansion], "d0", snapshot=False)
