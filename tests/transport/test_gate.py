"""Handshakes of unknown, slow and hostile peers: they cost little and delay no others."""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from ssd_serve.base.messages import Abort
from ssd_serve.transport.channel import SocketChannel, poll
from ssd_serve.transport.handshake import KeyGate
from ssd_serve.transport.listener import connect
from ssd_serve.transport.tls import TlsStream, identity
from tests.transport.tls_peers import KEY, Guarded, Heard, meet, no_descriptor_left


def test_silent_and_slow_peers_do_not_delay_a_valid_handshake(guarded: Guarded) -> None:
    strangers = [guarded.stranger() for _ in range(5)]
    strangers[0].send(b"x" * 10)
    assert guarded.listener.accept() is None
    server, client = meet(guarded.listener)
    assert not [why for why in guarded.refused if "in time" in why]
    for channel in (server, client):
        channel.close()
    for stranger in strangers:
        stranger.close()


def test_a_silent_peer_is_disconnected_after_the_timeout() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        refused: list[str] = []
        server.setblocking(False)
        gate = KeyGate(server, identity(KEY), refused.append, timeout_s=0.2)
        with closing(gate), closing(socket.create_connection(server.getsockname())) as stranger:
            deadline = time.monotonic() + 5.0
            while not refused and time.monotonic() < deadline:
                assert gate.accept() is None
                time.sleep(0.02)
            assert refused == ["127.0.0.1: the peer did not prove in time that it knows the key"]
            assert stranger.recv(1) == b""


@pytest.fixture
def crowded() -> Iterator[tuple[KeyGate, tuple[str, int], list[str]]]:
    """A gate on loopback, its address and its refusals."""
    refused: list[str] = []
    with closing(socket.create_server(("0.0.0.0", 0), backlog=200)) as server:
        server.setblocking(False)
        with closing(KeyGate(server, identity(KEY), refused.append, timeout_s=60.0)) as gate:
            yield gate, ("127.0.0.1", server.getsockname()[1]), refused


def wake(gate: KeyGate) -> None:
    """Let it greet until it has nothing more to do."""
    while select.select([gate], [], [], 0.05)[0]:
        assert gate.accept() is None


def test_too_many_handshakes_drop_the_oldest(
    crowded: tuple[KeyGate, tuple[str, int], list[str]],
) -> None:
    gate, address, refused = crowded
    with ExitStack() as stack:
        strangers = [stack.enter_context(closing(socket.create_connection(address))) for _ in range(70)]
        wake(gate)
        assert refused == ["127.0.0.1: too many unfinished handshakes"] * 6
        assert [stranger.recv(1) for stranger in strangers[:6]] == [b""] * 6, "the oldest"
        strangers[6].setblocking(False)
        with pytest.raises(BlockingIOError):
            strangers[6].recv(1)


def test_too_many_handshakes_drop_those_of_the_busiest_address(
    crowded: tuple[KeyGate, tuple[str, int], list[str]],
) -> None:
    gate, address, refused = crowded
    with ExitStack() as stack:
        honest = stack.enter_context(
            closing(socket.create_connection(address, source_address=("127.0.0.2", 0)))
        )
        for _ in range(150):
            stack.enter_context(closing(socket.create_connection(address)))
        wake(gate)
        assert len(refused) == 150 + 1 - 64
        assert all(who.startswith("127.0.0.1:") for who in refused)
        honest.setblocking(False)
        with pytest.raises(BlockingIOError):
            honest.recv(1)


def test_accept_limits_its_handshake_steps(crowded: tuple[KeyGate, tuple[str, int], list[str]]) -> None:
    gate, address, _ = crowded
    with ExitStack() as stack:
        hello = Heard()
        TlsStream(identity(KEY), listening=False).handshake(b"", hello.add)
        for _ in range(64):
            stack.enter_context(closing(socket.create_connection(address))).sendall(hello.data)
        calls = 0
        while select.select([gate], [], [], 0.05)[0]:
            assert gate.accept() is None
            calls += 1
        assert calls >= 64 / 8


def test_concurrent_valid_handshakes_are_all_accepted(guarded: Guarded) -> None:
    found: list[SocketChannel] = []
    threads = [
        threading.Thread(target=lambda: found.append(connect(guarded.listener.address, key=KEY)))
        for _ in range(30)
    ]
    for thread in threads:
        thread.start()
    servers: list[SocketChannel] = []
    while len(servers) < 30:
        channel = guarded.listener.await_peer(10.0)
        assert channel is not None
        servers.append(channel)
    for thread in threads:
        thread.join()
    for number, channel in enumerate(found):
        assert channel.send(Abort(number))
    assert poll(servers, 5.0)
    heard = sorted(message.request for each in servers if each.wait(5.0) for message in aborts(each))
    assert heard == list(range(30))
    for channel in (*found, *servers):
        channel.close()
    assert guarded.refused == []


def aborts(channel: SocketChannel) -> list[Abort]:
    return [message for message in channel.receive() if isinstance(message, Abort)]


def test_handshakes_resume_after_descriptor_exhaustion(guarded: Guarded) -> None:
    with closing(guarded.stranger()), no_descriptor_left():
        assert guarded.listener.accept() is None
        assert not guarded.listener.wait(0.05)
    server, client = meet(guarded.listener)
    server.close()
    client.close()


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n" * 8, bytes(64), b"\xff" * 100_000])
def test_garbage_instead_of_tls_is_refused(guarded: Guarded, garbage: bytes) -> None:
    with closing(guarded.stranger()) as stranger:
        stranger.send(garbage)
        guarded.until_refused(1)
    assert "does not know the key" in guarded.refused[0]


def test_a_peer_that_disconnects_during_the_handshake_is_refused(guarded: Guarded) -> None:
    guarded.stranger().close()
    guarded.until_refused(1)
    assert "left before it proved" in guarded.refused[0]


def test_an_endless_client_hello_is_refused(guarded: Guarded) -> None:
    with closing(guarded.stranger()) as stranger:
        # A handshake message that announces the most bytes, in records of full size.
        records = b"\x16\x03\x01\x40\x00" + b"\x01\x01\xf0\x00" + bytes(16380)
        with contextlib.suppress(OSError):
            stranger.sendall(records + (b"\x16\x03\x01\x40\x00" + bytes(16384)) * 3)
        guarded.until_refused(1)
    assert "does not know the key" in guarded.refused[0]
