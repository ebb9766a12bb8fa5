"""Channels over real sockets: nothing blocks, nothing is lost, nonsense closes."""

import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd_serve.cluster.channel import SocketChannel
from ssd_serve.cluster.listener import Listener, connect
from ssd_serve.cluster.polling import poll
from ssd_serve.errors import EngineDeadError, ProtocolError, SettingsError
from ssd_serve.messages import Abort, Growth, Message

Pair = tuple[SocketChannel, SocketChannel]


def growth(sequence: int, size: int) -> Growth:
    return Growth(1, 0, sequence, b"p" * size, b"", b"", b"t", b"l")


@pytest.fixture
def pair() -> Iterator[Pair]:
    first, second = socket.socketpair()
    channels = SocketChannel(first, queue_bytes=100_000), SocketChannel(second, queue_bytes=100_000)
    yield channels
    for channel in channels:
        channel.close()


def receive_until(channel: SocketChannel, count: int) -> list[Message]:
    received: list[Message] = []
    while len(received) < count and channel.wait(5.0):
        received += channel.receive()
    return received


def test_messages_arrive_in_order_both_ways(pair: Pair) -> None:
    there = [Abort(number) for number in range(100)]
    assert all(pair[0].send(message) for message in there)
    assert pair[1].send(growth(0, 10))
    assert receive_until(pair[1], 100) == there
    assert receive_until(pair[0], 1) == [growth(0, 10)]
    assert pair[0].receive() == []
    assert not pair[0].wait(0.0)


def test_a_slow_receiver_makes_send_say_no_and_never_block(pair: Pair) -> None:
    accepted, began = 0, time.monotonic()
    while pair[0].send(growth(accepted, 20_000)):
        accepted += 1
        assert accepted < 10_000
    assert time.monotonic() - began < 5.0
    assert 100_000 < pair[0].pending < 130_000
    assert not pair[0].send(Abort(1))
    received: list[Message] = []
    while len(received) < accepted:
        received += pair[1].receive()
        pair[0].flush()
    assert received == [growth(number, 20_000) for number in range(accepted)]
    assert pair[0].pending == 0
    assert pair[0].send(Abort(1))


def test_a_message_larger_than_every_buffer_goes_through_in_parts(pair: Pair) -> None:
    assert pair[0].send(growth(0, 3_000_000))
    assert pair[0].pending > 0
    received: list[Message] = []
    while not received:
        assert poll(pair, 5.0) == [pair[1]]
        received = pair[1].receive()
    assert received == [growth(0, 3_000_000)]


def test_what_was_said_before_the_end_is_still_received(pair: Pair) -> None:
    pair[0].send(Abort(1))
    pair[0].close()
    while pair[1].send(Abort(9)):
        pass
    assert pair[1].closed
    assert pair[1].receive() == [Abort(1)]
    assert pair[1].receive() == []
    assert not pair[1].send(Abort(2))
    assert pair[1].wait(0.0)


def test_the_end_is_noticed_by_receiving(pair: Pair) -> None:
    pair[0].close()
    assert pair[1].wait(1.0)
    assert pair[1].receive() == []
    assert pair[1].closed


def test_nonsense_closes_the_channel_after_what_came_before() -> None:
    raw, other = socket.socketpair()
    channel = SocketChannel(other)
    sender = SocketChannel(raw.dup())
    sender.send(Abort(7))
    raw.sendall(struct.pack("<I", 3) + b"abc")
    assert channel.receive() == [Abort(7)]
    assert channel.closed
    with pytest.raises(ProtocolError):
        channel.receive()
    assert channel.closed
    assert channel.fileno() == -1
    sender.close()
    raw.close()


def test_only_the_owner_can_reach_a_unix_listener(tmp_path: Path) -> None:
    listener = Listener.unix(tmp_path / "verifier.sock")
    assert stat.S_IMODE(os.stat(listener.address).st_mode) == 0o600
    assert listener.accept() is None
    client = connect(listener.address)
    assert poll([listener], 1.0) == [listener]
    server = listener.accept()
    assert server is not None
    client.send(Abort(3))
    assert receive_until(server, 1) == [Abort(3)]
    for closeable in (client, server, listener):
        closeable.close()
    assert not Path(listener.address).exists()


def test_a_stale_socket_file_is_replaced(tmp_path: Path) -> None:
    stale = Listener.unix(tmp_path / "s")
    fresh = Listener.unix(tmp_path / "s")
    connect(fresh.address).close()
    assert fresh.wait(1.0)
    for listener in (stale, fresh):
        listener.close()


def test_nobody_there_is_an_error_with_the_address(tmp_path: Path) -> None:
    with pytest.raises(EngineDeadError, match=r"nobody answers at .*none"):
        connect(str(tmp_path / "none"), timeout_s=0.05)
    with pytest.raises(EngineDeadError):
        connect(str(tmp_path / "none"), timeout_s=60, give_up=lambda: True)


def test_a_path_that_no_kernel_takes_is_a_settings_error() -> None:
    with pytest.raises(SettingsError, match="SSD_RUN_DIR"):
        Listener.unix("/tmp/" + "x" * 120)
