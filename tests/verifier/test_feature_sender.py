"""Tests of the feature sender: flow control, shared memory where possible, and outcomes that never wait."""

import gc
import os
import socket
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from msgspec.structs import replace

from ssd_serve.base.draft_messages import (
    Features,
    Heartbeat,
    Message,
    Open,
    Outcome,
    SharedMemory,
    SharedMemoryRead,
)
from ssd_serve.base.logs import get_logger
from ssd_serve.drafter.verifier_connection import VERIFIER_LIMITS
from ssd_serve.transport.channel import ReceiveLimits, SocketChannel
from ssd_serve.transport.shared_memory import SharedReader, SharedSpan
from ssd_serve.verifier.drafters.connection import Liveness
from ssd_serve.verifier.drafters.features import FeatureSender, FeatureStore
from ssd_serve.verifier.drafters.pool import DrafterPool
from ssd_serve.verifier.request import Request
from tests.examples import examples
from tests.fakes import HELLO
from tests.verifier.drafter_factory import make_request

Pair = tuple[SocketChannel, SocketChannel]
LAYERS = (0, 1)
WIDTH = 1 << 18
"""Feature values per token; at 2 bytes each, 512 KiB."""
SHORT = 128
REQUESTS, TOKENS = 6, 5


def compute(store: FeatureStore, request: Request, end: int, width: int = WIDTH) -> None:
    """Give the request slots up to position `end`, and the store their features."""
    start = len(request.slots)
    slots = np.arange(start, end) + 100 * request.number
    rows = [
        torch.full((width,), 1000 * request.number + place, dtype=torch.int16) for place in range(start, end)
    ]
    request.slots.extend(slots.tolist())
    store.keep(slots, torch.stack(rows).view(torch.bfloat16))


def row(number: int, position: int, numbers: int = WIDTH) -> bytes:
    return (1000 * number + position).to_bytes(2, "little") * numbers


def memory_maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:ssd-features")


class Far:
    """Drafter at one end of a socket, and a drafter pool with requests at the other."""

    def __init__(self, shares: bool) -> None:
        mine, its = socket.socketpair()
        self.drafters = DrafterPool(HELLO, clock=lambda: 0.0, log=get_logger("verifier", "error"))
        self.store = FeatureStore(LAYERS, 64 << 20, 1000)
        self.drafters.offer(self.store)
        self.drafters.connect(SocketChannel(mine))
        self.channel = SocketChannel(its, limits=ReceiveLimits(descriptors=shares))
        self.channel.send(replace(HELLO, features=LAYERS))
        self.requests: dict[int, Request] = {}
        self.messages: list[Message] = []
        self.shared: SharedReader | None = None
        self.drain()
        self.receive()
        (offer,) = (message for message in self.messages if isinstance(message, SharedMemory))
        if shares:
            self.shared = SharedReader(self.channel.take_descriptor(), offer.size)
            self.acknowledge()
        for number in range(REQUESTS):
            self.requests[number] = make_request(number)
            compute(self.store, self.requests[number], TOKENS)

    def drain(self) -> None:
        self.drafters.drain(self.requests)

    def acknowledge(self) -> None:
        if self.shared is not None:
            self.channel.send(SharedMemoryRead(self.shared.read))
        self.drain()

    def receive(self) -> bool:
        received = [message for _ in range(4) if self.channel.wait(0.0) for message in self.channel.receive()]
        self.messages += received
        return bool(received)

    def receive_all(self) -> None:
        """Receive all messages, and read shared rows only when no more messages arrive."""
        while True:
            while self.receive() or self.drafters.channels[0].pending:
                self.drain()
                self.drafters.flush()
            if not self.read_all():
                return
            self.acknowledge()
            self.drafters.flush()

    def read_all(self) -> bool:
        unread = [
            (place, message)
            for place, message in enumerate(self.messages)
            if isinstance(message, Features) and message.shared is not None
        ]
        for place, message in unread:
            assert self.shared is not None
            assert message.shared is not None
            assert not message.data
            self.messages[place] = replace(
                message, data=self.shared.copy(SharedSpan(*message.shared)), shared=None
            )
        return bool(unread)

    def read(self, number: int) -> bytes:
        chunks = [each for each in self.messages if isinstance(each, Features) and each.request == number]
        ends = [each.position + len(each.data) // (2 * each.width) for each in chunks]
        assert [each.position for each in chunks] == [0, *ends[:-1]]
        return b"".join(each.data for each in chunks)

    def close(self) -> None:
        self.channel.close()
        for channel in self.drafters.channels:
            channel.close()


@contextmanager
def joined(shares: bool) -> Generator[Far]:
    far = Far(shares)
    try:
        yield far
    finally:
        far.close()


def commit(far: Far, request: Request) -> None:
    request.tokens.extend((3,))
    assert request.replica is not None
    request.replica.advance((3,))
    far.drafters.send_outcome(request)


@pytest.mark.parametrize("shares", [False, True])
def test_outcomes_do_not_wait_for_features(shares: bool) -> None:
    with joined(shares) as far:
        for request in far.requests.values():
            far.drafters.open(request)
        for request in far.requests.values():
            compute(far.store, request, TOKENS + 1)
            commit(far, request)
        far.drafters.flush()
        assert far.drafters.channels[0].pending < (1 << 10 if shares else 4 << 20)
        far.receive_all()
        assert sum(isinstance(message, Open) for message in far.messages) == REQUESTS  # opened only once
        assert sum(isinstance(message, Outcome) for message in far.messages) == REQUESTS
        for number in far.requests:
            assert far.read(number) == b"".join(row(number, position) for position in range(TOKENS + 1))


@given(st.lists(st.sampled_from(["tokens", "receive", "read"]), max_size=40))
@settings(max_examples=examples(60), deadline=None)
def test_shared_memory_is_not_overwritten_before_it_was_read(events: list[str]) -> None:
    memory = 24 * 2 * SHORT
    mine, its = socket.socketpair()
    with closing(SocketChannel(mine)) as near, closing(SocketChannel(its, limits=VERIFIER_LIMITS)) as far:
        sender, request = FeatureSender(near, memory), make_request(1)
        store = FeatureStore(LAYERS, 1 << 20, 2000)
        sender.begin(LAYERS, store, get_logger("verifier", "error"))
        assert far.receive() == [SharedMemory(memory)]
        reader = SharedReader(far.take_descriptor(), memory)
        sender.on_read(0)
        received: list[Message] = []
        found, sent = b"", 0
        for event in [*events, *["tokens", "receive", "read"] * 6]:
            if event == "tokens":
                compute(store, request, len(request.slots) + 10, SHORT)
                sent = sender.send(request, sent)
                near.flush()
            elif event == "receive":
                received += far.receive()
            else:
                for message in received:
                    assert isinstance(message, Features)
                    assert message.shared is not None
                    assert message.position * 2 * SHORT == len(found)
                    found += reader.copy(SharedSpan(*message.shared))
                sender.on_read(reader.read)
                received.clear()
        assert len(found) == sent * 2 * SHORT > memory
        assert found == b"".join(row(1, position, SHORT) for position in range(sent))
        assert sender.behind or sent == len(request.slots)


@pytest.mark.parametrize("total", [-1, 1])
def test_impossible_shared_memory_read_closes_the_connection(total: int) -> None:
    with joined(shares=True) as far:
        far.channel.send(SharedMemoryRead(total))
        far.drain()
        assert far.drafters.num_joined == 0


def test_shared_memory_read_is_no_answer_to_an_outcome() -> None:
    """If SharedMemoryRead counted as an answer, rounds would wait for a drafter that only reads."""
    now = [0.0]
    liveness = Liveness(lambda: now[0], synchronous=False)
    now[0] = 1.0
    liveness.on_request()
    now[0] = 2.0
    liveness.on_message(SharedMemoryRead(3))
    assert not liveness.is_responsive
    liveness.on_message(Heartbeat())
    assert liveness.is_responsive


def test_shared_memory_is_freed_with_the_connection() -> None:
    gc.collect()  # engines of other tests
    before = memory_maps()
    with joined(shares=True) as far:
        assert memory_maps() == before + 2
        far.shared = None
        far.channel.close()
        far.drain()
        assert not far.drafters.num_joined
        assert memory_maps() == before


@pytest.fixture
def pair() -> Generator[Pair]:
    mine, its = (SocketChannel(each) for each in socket.socketpair())
    with closing(mine), closing(its):
        yield mine, its


def test_features_are_sent_in_messages_without_shared_memory(
    pair: tuple[SocketChannel, SocketChannel],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refused(*_: object) -> int:
        raise OSError("not today")

    monkeypatch.setattr(os, "memfd_create", refused)
    mine, its = pair
    sender, request = FeatureSender(mine), make_request(1)
    store = FeatureStore(LAYERS, 64 << 20, 1000)
    compute(store, request, TOKENS)
    sender.begin(LAYERS, store, get_logger("verifier"))
    assert 'features are sent through the socket reason="not today"' in capsys.readouterr().err
    assert sender.send(request, 3) == 5
    received: list[Message] = []
    for _ in range(100):
        mine.flush()
        received += its.receive()
    assert [each.data for each in received if isinstance(each, Features)] == [row(1, 3) + row(1, 4)]
