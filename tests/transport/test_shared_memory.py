"""Tests of memory shared over a unix socket: flow control, validation of offers, release of descriptors."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from ssd_serve.base.draft_messages import SharedMemory
from ssd_serve.base.errors import ProtocolError
from ssd_serve.base.messages import Abort
from ssd_serve.transport.channel import ReceiveLimits, SocketChannel
from ssd_serve.transport.shared_memory import RingAllocator, SharedReader, SharedSpan, SharedWriter
from tests.examples import examples
from tests.transport.tls_peers import shaken_pair

SIZE = 1 << 16
Pair = tuple[SocketChannel, SocketChannel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two connected channels; the second accepts file descriptors."""
    first, second = socket.socketpair()
    channels = SocketChannel(first), SocketChannel(second, limits=ReceiveLimits(descriptors=True))
    yield channels
    for channel in channels:
        channel.close()


def shared_pair(pair: Pair, size: int = SIZE) -> tuple[SharedWriter, SharedReader]:
    writer = SharedWriter(size)
    assert pair[0].send_with(SharedMemory(size), writer.descriptor)
    writer.close()
    assert pair[1].wait(5.0)
    assert pair[1].receive() == [SharedMemory(size)]
    return writer, SharedReader(pair[1].take_descriptor(), size)


def maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:ssd-features")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@given(st.integers(1, 3000), st.lists(st.integers(-9, 1200), max_size=60))
@settings(max_examples=examples(300), deadline=None)
def test_taken_spans_never_overlap_and_return_in_order(size: int, actions: list[int]) -> None:
    """An action above 0 allocates that many bytes; any other returns up to that many spans."""
    pieces, held, returned = RingAllocator(size), list[range](), 0
    for action in actions:
        if action > 0:
            offset = pieces.find(action)
            if offset is None:
                assert held or action > size
                continue
            new = range(offset, offset + action)
            assert 0 <= new.start < new.stop <= size
            assert all(new.stop <= each.start or each.stop <= new.start for each in held)
            pieces.take(SharedSpan(offset, action))
            held.append(new)
        else:
            count = min(-action, len(held))
            del held[:count]
            returned += count
            pieces.give_back(returned)
        assert len(pieces) == len(held)


def test_find_uses_free_bytes_at_both_ends() -> None:
    pieces = RingAllocator(300)
    for offset in (0, 64, 128):
        assert pieces.find(64) == offset
        pieces.take(SharedSpan(offset, 64))
    assert pieces.find(128) is None
    pieces.give_back(2)
    assert pieces.find(108) == 192
    assert pieces.find(120) == 0
    pieces.take(SharedSpan(0, 120))
    assert pieces.find(1) is None  # the next offset is 128 (64-byte alignment), which is still taken
    pieces.give_back(4)
    assert pieces.find(300) == 0


@pytest.mark.parametrize("total", [-1, 1, 4])
def test_an_impossible_return_count_is_a_protocol_error(total: int) -> None:
    pieces = RingAllocator(300)
    for offset in (0, 64, 128):
        pieces.take(SharedSpan(offset, 64))
    pieces.give_back(2)
    with pytest.raises(ProtocolError, match="cannot have been read"):
        pieces.give_back(total)
    pieces.give_back(2)
    pieces.give_back(3)


def test_the_reader_sees_written_spans(pair: Pair) -> None:
    writer, reader = shared_pair(pair)
    for place, text in (
        (SharedSpan(0, 5), b"first"),
        (SharedSpan(64, 6), b"second"),
        (SharedSpan(SIZE - 4, 4), b"last"),
    ):
        writer.at(place)[:] = text
        assert reader.copy(place) == text
    assert reader.read == 3


@pytest.mark.parametrize("place", [(-1, 4), (0, -1), (SIZE - 3, 4), (SIZE, 1), (1 << 62, 1 << 62)])
def test_spans_out_of_range_are_rejected(pair: Pair, place: tuple[int, int]) -> None:
    _, reader = shared_pair(pair)
    with pytest.raises(ProtocolError, match="of shared memory"):
        reader.copy(SharedSpan(*place))
    assert reader.read == 0


def offered(size: int, seals: int, claimed: int) -> SharedReader:
    descriptor = os.memfd_create("another", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return SharedReader(descriptor, claimed)


@pytest.mark.parametrize(
    ("size", "seals", "claimed"),
    [
        (SIZE, 0, SIZE),
        (SIZE, fcntl.F_SEAL_GROW, SIZE),
        (SIZE, fcntl.F_SEAL_SHRINK, 2 * SIZE),
        (SIZE, fcntl.F_SEAL_SHRINK, SIZE // 2),
        (0, fcntl.F_SEAL_SHRINK, 0),
        (SIZE, fcntl.F_SEAL_SHRINK, -1),
        (1 << 40, fcntl.F_SEAL_SHRINK, 1 << 40),
    ],
)
def test_unsealed_or_wrongly_sized_memory_is_not_mapped(size: int, seals: int, claimed: int) -> None:
    before = open_files()
    with pytest.raises(ProtocolError, match="no sealed memory of this size"):
        offered(size, seals, claimed)
    assert open_files() == before


def test_a_regular_file_is_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    with pytest.raises(ProtocolError, match="no sealed memory of this size"):
        SharedReader(os.open(path, os.O_RDONLY), SIZE)


def test_an_offer_without_a_descriptor_is_an_os_error() -> None:
    with pytest.raises(OSError, match="no descriptor"):
        SharedReader(-1, SIZE)


def test_mappings_and_descriptors_are_released(pair: Pair) -> None:
    before = maps(), open_files(), sorted(os.listdir("/dev/shm"))
    writer, reader = shared_pair(pair)
    assert maps() == before[0] + 2
    assert sorted(os.listdir("/dev/shm")) == before[2]  # the memory has no file name
    del writer, reader
    assert (maps(), open_files()) == before[:2]


def test_untaken_descriptors_are_closed(pair: Pair) -> None:
    before = open_files()
    with Path("/dev/null").open("rb") as file:
        for number in range(3):
            assert pair[0].send_with(Abort(number), file.fileno())
        socket.send_fds(pair[0]._socket, [b"\1"], [file.fileno()] * 3)  # pyright: ignore[reportPrivateUsage]
        heard = [message for _ in range(4) if pair[1].wait(0.1) for message in pair[1].receive()]
    assert heard == [Abort(0), Abort(1), Abort(2)]
    assert open_files() == before + 1  # the last descriptor may still be taken
    pair[1].close()
    assert open_files() == before - 1


def test_descriptors_are_ignored_unless_accepted() -> None:
    first, second = (SocketChannel(each) for each in socket.socketpair())
    before = open_files()
    with Path("/dev/null").open("rb") as file:
        assert first.send_with(Abort(1), file.fileno())
    assert second.wait(5.0)
    assert second.receive() == [Abort(1)]
    assert (second.take_descriptor(), open_files()) == (-1, before)
    first.close()
    second.close()


def test_descriptors_are_not_sent_over_tcp() -> None:
    first, second = socket.socketpair()
    with closing(SocketChannel(first, tls=shaken_pair()[0])) as channel, closing(second):
        assert not channel.send_with(Abort(1), 0)


def test_a_descriptor_does_not_overtake_pending_bytes(pair: Pair) -> None:
    channel, other = pair
    while not channel.pending:
        channel.send(Abort(1))
    assert not channel.send_with(Abort(2), 0)
    while channel.pending:
        other.receive()
        channel.flush()
    assert channel.send_with(Abort(2), 0)
