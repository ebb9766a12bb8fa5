"""A verifier that shares memory with its drafter: rows are taken from there, and nonsense about it ends that
connection and nothing else."""

import os
import socket
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from ssd_serve.base.draft_messages import (
    Features,
    Message,
    Open,
    SharedMemory,
    SharedMemoryRead,
)
from ssd_serve.base.logs import get_logger
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.cache.vectors import as_bytes
from ssd_serve.drafter.verifier_connection import VERIFIER_LIMITS, VerifierConnection
from ssd_serve.transport.channel import Channel, ReceiveLimits, SocketChannel
from ssd_serve.transport.shared_memory import SharedSpan, SharedWriter
from tests.fakes import GROWTH, HELLO, ScriptedSource, core_of

OPEN = Open(1, 1, (5, 6), (), SamplingParameters(max_tokens=9), 0, root=1)
WIDTH, SIZE = 8, 1 << 12
ROWS = torch.arange(3 * WIDTH).view(3, WIDTH).to(torch.bfloat16)
AT = SharedSpan(64, 2 * ROWS.numel())
TOLD = Features(1, 1, 0, WIDTH, b"", AT)


class ReadingSource(ScriptedSource):
    def __init__(self) -> None:
        super().__init__()
        self.given: list[torch.Tensor] = []

    def read(self, request: int, position: int, features: torch.Tensor) -> None:
        del request, position
        self.given.append(features)


class Verifier:
    """The other end of a drafter's connection."""

    def __init__(self, limits: ReceiveLimits = VERIFIER_LIMITS) -> None:
        first, second = socket.socketpair()
        self.channel = SocketChannel(first)
        self.source = ReadingSource()
        self.drafter = VerifierConnection(
            core_of(self.source, GROWTH),
            HELLO,
            get_logger("drafter"),
            channel=SocketChannel(second, limits=limits),
        )
        self.memory = SharedWriter(SIZE)
        self.channel.receive()

    def offer(self, size: int = SIZE) -> None:
        assert self.channel.send_with(SharedMemory(size), self.memory.descriptor)

    def say(self, *messages: Message) -> Sequence[Message]:
        for message in messages:
            self.channel.send(message)
        self.drafter.receive()
        if self.drafter.channel is not None:
            self.drafter.channel.flush()
        return self.channel.receive()

    def close(self) -> None:
        self.memory.close()
        self.channel.close()
        drafters: Channel | None = self.drafter.channel
        if drafters is not None:
            drafters.close()


def memory_maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:ssd-features")


def test_shared_rows_are_copied_and_acknowledged() -> None:
    with closing(Verifier()) as verifier:
        verifier.offer()
        assert verifier.say(OPEN) == [SharedMemoryRead(0)]
        verifier.memory.at(AT)[:] = as_bytes(ROWS)
        assert verifier.say(TOLD, replace(TOLD, position=3)) == [SharedMemoryRead(2)]
        verifier.memory.at(AT)[:] = bytes(AT.length)  # it has what it has
        assert [rows.tolist() for rows in verifier.source.given] == 2 * [ROWS.tolist()]
        assert verifier.say() == []


def test_unused_features_are_acknowledged_too() -> None:
    with closing(Verifier()) as verifier:
        verifier.offer()
        assert verifier.say(TOLD, replace(TOLD, request=9), replace(TOLD, epoch=3)) == [SharedMemoryRead(3)]


@pytest.mark.parametrize(
    "nonsense",
    [
        replace(TOLD, shared=(SIZE - 4, 8)),
        replace(TOLD, shared=(-8, 8)),
        replace(TOLD, shared=(0, -8)),
        replace(TOLD, shared=(1 << 63, 1 << 63)),
        replace(TOLD, shared=(0, 2 * WIDTH - 1)),
        replace(TOLD, width=0),
    ],
)
def test_invalid_spans_end_the_connection(nonsense: Features, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(Verifier()) as verifier:
        verifier.offer()
        verifier.say(OPEN)
        verifier.say(nonsense)
        assert verifier.drafter.gone
        assert "verifier broke the protocol" in capsys.readouterr().err


def test_spans_without_shared_memory_end_the_connection(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(Verifier()) as verifier:
        verifier.say(OPEN, TOLD)
        assert verifier.drafter.gone
        assert "shared memory that was not offered" in capsys.readouterr().err


def test_shared_memory_of_another_size_ends_the_connection(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(Verifier()) as verifier:
        verifier.offer(2 * SIZE)
        verifier.say()
        assert verifier.drafter.gone
        assert "no sealed memory of this size" in capsys.readouterr().err


def test_without_a_descriptor_features_come_in_messages(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(Verifier(ReceiveLimits())) as verifier:
        verifier.offer()
        assert verifier.say(OPEN) == []
        assert "features come through the socket" in capsys.readouterr().err
        verifier.say(Features(1, 1, 0, WIDTH, as_bytes(ROWS)))
        assert torch.equal(verifier.source.given[0], ROWS)


def test_a_lost_verifier_leaves_no_mapping() -> None:
    before, files = memory_maps(), len(os.listdir("/proc/self/fd"))
    with closing(Verifier()) as verifier:
        verifier.offer()
        verifier.say(OPEN)
        assert memory_maps() == before + 2
        verifier.channel.close()
        verifier.drafter.receive()
        assert memory_maps() == before + 1  # the verifier's own
        del verifier.memory._bytes  # pyright: ignore[reportPrivateUsage]
    assert (memory_maps(), len(os.listdir("/proc/self/fd"))) == (before, files)
