"""What the target has computed is sent as fast as the drafter takes it, and nothing else waits for it."""

import socket
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from ssd_serve.cluster.channels.channel import SocketChannel
from ssd_serve.messages import Features, Message, Open, Outcome
from ssd_serve.verifier.drafts.drafters import Drafters
from ssd_serve.verifier.request import Request
from tests.fakes import HELLO
from tests.verifier.drafter_house import make_request

LAYERS = (0, 1)
WIDTH = 1 << 18
"""Numbers of a token: half a MiB."""
REQUESTS, TOKENS = 6, 5


@dataclass
class Rows:
    """A request's rows say whose they are and which."""

    number: int
    end: int = TOKENS

    def first(self, start: int) -> int:
        return start

    def width(self, layers: Sequence[int]) -> int:
        return WIDTH // 2 * len(layers)

    def part(self, start: int, count: int, layers: Sequence[int]) -> bytes:
        return b"".join(row(self.number, start + place) for place in range(count))


def row(number: int, position: int) -> bytes:
    return bytes((number, position)) * WIDTH


class Far:
    """A drafter at the other end of a socket, and a verifier with requests."""

    def __init__(self) -> None:
        mine, its = socket.socketpair()
        self.drafters = Drafters(HELLO, clock=lambda: 0.0)
        self.drafters.admission.offer(LAYERS)
        self.drafters.connect(SocketChannel(mine))
        self.channel = SocketChannel(its)
        self.channel.send(replace(HELLO, features=LAYERS))
        self.requests: dict[int, Request] = {}
        self.told: list[Message] = []
        self.drain()
        self.hear()
        for number in range(REQUESTS):
            self.requests[number] = make_request(number)
            self.requests[number].features = Rows(number)

    def drain(self) -> None:
        self.drafters.drain(self.requests)

    def hear(self) -> bool:
        """Whether there was anything."""
        heard = [message for _ in range(4) if self.channel.wait(0.0) for message in self.channel.receive()]
        self.told += heard
        return bool(heard)

    def hear_all(self) -> None:
        while self.hear() or self.drafters.channels[0].pending:
            self.drain()
            self.drafters.flush()

    def read(self, number: int) -> bytes:
        """All rows of a request, which have come in order."""
        parts = [each for each in self.told if isinstance(each, Features) and each.request == number]
        ends = [each.position + len(each.data) // (2 * each.width) for each in parts]
        assert [each.position for each in parts] == [0, *ends[:-1]]
        return b"".join(each.data for each in parts)


@pytest.fixture
def far() -> Generator[Far]:
    far = Far()
    yield far
    far.channel.close()
    for channel in far.drafters.channels:
        channel.close()


def commit(far: Far, request: Request) -> None:
    request.tokens.extend((3,))
    assert request.replica is not None
    request.replica.advance((3,))
    far.drafters.outcome(request)


def test_outcomes_go_on_while_nobody_takes_the_rows_which_come_later_whole_and_in_order(far: Far) -> None:
    for request in far.requests.values():
        far.drafters.open(request)
    for request in far.requests.values():
        request.features = Rows(request.number, TOKENS + 1)
        commit(far, request)
    far.drafters.flush()
    assert far.drafters.channels[0].pending < 4 << 20
    far.hear_all()
    assert sum(isinstance(message, Open) for message in far.told) == REQUESTS  # nobody was told again
    assert sum(isinstance(message, Outcome) for message in far.told) == REQUESTS
    for number in far.requests:
        assert far.read(number) == b"".join(row(number, position) for position in range(TOKENS + 1))
