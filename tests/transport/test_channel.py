"""Channels over real sockets: nothing blocks, nothing is lost, nonsense closes."""

import os
import resource
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ssd_serve.base.draft_messages import (
    Growth,
    Heartbeat,
    Hello,
    Message,
    Refusal,
)
from ssd_serve.base.errors import EngineDeadError, ProtocolError, SettingsError
from ssd_serve.base.messages import Abort
from ssd_serve.transport.channel import ReceiveLimits, SocketChannel, poll
from ssd_serve.transport.listener import Listener, connect
from tests.transport.tls_peers import no_descriptor_left, shaken_pair

Pair = tuple[SocketChannel, SocketChannel]


def growth(sequence: int, size: int) -> Growth:
    return Growth(1, 0, sequence, b"p" * size, b"", b"", b"t", b"l")


@pytest.fixture(params=["plain", "sealed"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    first, second = socket.socketpair()
    seals = shaken_pair() if request.param == "sealed" else (None, None)
    channels = (
        SocketChannel(first, queue_bytes=100_000, tls=seals[0]),
        SocketChannel(second, queue_bytes=100_000, tls=seals[1]),
    )
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


def test_send_returns_false_and_never_blocks_for_a_slow_receiver(pair: Pair) -> None:
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


def test_a_message_larger_than_all_buffers_is_sent_in_parts(pair: Pair) -> None:
    assert pair[0].send(growth(0, 3_000_000))
    assert pair[0].pending > 0
    received: list[Message] = []
    while not received:
        assert poll(pair, 5.0) == [pair[1]]
        received = pair[1].receive()
    assert received == [growth(0, 3_000_000)]


def test_large_messages_in_both_directions_at_once(pair: Pair) -> None:
    sent = [growth(number, 90_000) for number in range(20)]
    unsent: list[list[Message]] = [list(sent), list(sent)]
    received: tuple[list[Message], list[Message]] = ([], [])
    while len(received[0]) + len(received[1]) < 40:
        for one, channel in enumerate(pair):
            while unsent[one] and channel.send(unsent[one][0]):
                unsent[one].pop(0)
        assert poll(pair, 5.0)
        for one, channel in enumerate(pair):
            received[one].extend(channel.receive())
    assert received == (sent, sent)


def test_messages_sent_before_close_are_still_received(pair: Pair) -> None:
    pair[0].send(Abort(1))
    pair[0].close()
    while pair[1].send(Abort(9)):
        pass
    assert pair[1].closed
    assert pair[1].receive() == [Abort(1)]
    assert pair[1].receive() == []
    assert not pair[1].send(Abort(2))
    assert pair[1].wait(0.0)


def test_receive_notices_a_closed_peer(pair: Pair) -> None:
    pair[0].close()
    assert pair[1].wait(1.0)
    assert pair[1].receive() == []
    assert pair[1].closed


def test_malformed_data_closes_the_channel_after_earlier_messages() -> None:
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


def test_a_unix_listener_is_private_to_its_user(tmp_path: Path) -> None:
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


def test_connecting_to_no_listener_names_the_address(tmp_path: Path) -> None:
    with pytest.raises(EngineDeadError, match=r"no process answers at .*none"):
        connect(str(tmp_path / "none"), timeout_s=0.05)
    with pytest.raises(EngineDeadError):
        connect(str(tmp_path / "none"), timeout_s=60, give_up=lambda: True)


def test_a_socket_path_that_is_too_long_is_a_settings_error() -> None:
    with pytest.raises(SettingsError, match="SSD_RUN_DIR"):
        Listener.unix("/tmp/" + "x" * 120)


def test_accept_pauses_while_descriptors_are_exhausted(tmp_path: Path) -> None:
    with closing(Listener.unix(tmp_path / "s")) as listener, closing(connect(listener.address)):
        with no_descriptor_left():
            assert listener.accept() is None
            assert listener.fileno() == -1
            assert not listener.wait(0.0)
        accepted = listener.await_peer(5.0)
        assert accepted is not None
        assert accepted.peer == ""
        accepted.close()


def test_connect_retries_while_descriptors_are_exhausted(tmp_path: Path) -> None:
    tries: list[float] = []

    def give_up() -> bool:
        tries.append(time.monotonic())
        if len(tries) == 3:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        return False

    with closing(Listener.unix(tmp_path / "s")) as listener:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with no_descriptor_left():
            connect(listener.address, 20.0, give_up=give_up).close()
        assert len(tries) == 3
        with no_descriptor_left(), pytest.raises(EngineDeadError, match="cannot connect"):
            connect(listener.address, 0.05)


def test_receive_limits_bytes_and_message_types() -> None:
    first, second = socket.socketpair()
    limits = ReceiveLimits(frame_bytes=1000, drain_bytes=4096, kinds=Heartbeat | Hello)
    with closing(SocketChannel(first)) as sender, closing(SocketChannel(second, limits=limits)) as channel:
        for _ in range(1000):
            sender.post(Heartbeat())
        assert sender.flush()
        heard = [len(channel.receive()) for _ in range(20)]
        assert sum(heard) == 1000
        assert max(heard) < 300
        sender.send(Refusal("x" * 2000))
        with pytest.raises(ProtocolError, match="larger than the limit of 1000"):
            channel.receive()


@pytest.mark.parametrize("kind", ["file", "folder", "link to a file"])
def test_only_a_stale_socket_file_is_replaced(tmp_path: Path, kind: str) -> None:
    path, kept = tmp_path / "precious", tmp_path / "kept"
    kept.write_text("x")
    if kind == "folder":
        path.mkdir()
    elif kind == "file":
        path.write_text("x")
    else:
        path.symlink_to(kept)
    with pytest.raises(SettingsError, match="is no socket: name another path"):
        Listener.at(str(path))
    assert path.is_dir() if kind == "folder" else path.read_text() == "x"
    path = tmp_path / "left.sock"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    Listener.at(str(path)).close()
    assert not path.exists()
