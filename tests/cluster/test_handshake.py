"""TCP channels: who knows the key may speak, and nobody who does not can disturb the others."""

import os
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ssd_serve.cluster.channel import SocketChannel
from ssd_serve.cluster.handshake import Gate
from ssd_serve.cluster.listener import Listener, connect
from ssd_serve.cluster.polling import poll
from ssd_serve.errors import EngineDeadError, ProtocolError, SettingsError
from ssd_serve.messages import Abort, Growth, Message

KEY = "a key of the tests"


class Guarded:
    """A listener that remembers whom it refused."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.listener = Listener.tcp("127.0.0.1", 0, KEY, self.refused.append)

    @property
    def port(self) -> int:
        return int(self.listener.address.rpartition(":")[2])

    def stranger(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port))

    def until_refused(self, count: int) -> None:
        deadline = time.monotonic() + 10.0
        while len(self.refused) < count and time.monotonic() < deadline:
            self.listener.wait(0.1)
            assert self.listener.accept() is None


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    found = Guarded()
    yield found
    found.listener.close()


def meet(listener: Listener) -> tuple[SocketChannel, SocketChannel]:
    """Both ends of one channel; the connector is a thread, as it blocks."""
    ends: list[SocketChannel] = []
    thread = threading.Thread(target=lambda: ends.append(connect(listener.address, key=KEY)))
    thread.start()
    server = listener.await_peer(10.0)
    thread.join()
    assert server is not None
    return server, ends[0]


def failing_to_connect(listener: Listener, key: str, timeout_s: float = 5.0) -> Exception:
    """What a connector with this key gets."""
    errors: list[Exception] = []

    def attempt() -> None:
        try:
            connect(listener.address, timeout_s, key=key).close()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    while thread.is_alive():
        listener.wait(0.05)
        assert listener.accept() is None
    return errors[0]


def test_who_knows_the_key_may_speak_both_ways(guarded: Guarded) -> None:
    server, client = meet(guarded.listener)
    with closing(server), closing(client):
        large = Growth(1, 0, 0, b"p" * 500_000, b"", b"", b"t", b"l")
        assert server.send(large)
        received: list[Message] = []
        while not received:
            poll([client, server], 5.0)
            received = client.receive()
            server.flush()
        assert received == [large]
        client.send(Abort(3))
        assert server.wait(5.0)
        assert server.receive() == [Abort(3)]
    assert guarded.refused == []


@hypothesis_settings(max_examples=10, deadline=None)
@given(sizes=st.lists(st.integers(0, 200_000), max_size=6))
def test_messages_pass_unchanged(sizes: list[int]) -> None:
    with closing(Listener.tcp("127.0.0.1", 0, KEY)) as listener:
        server, client = meet(listener)
        sent: list[Message] = [
            Growth(1, 0, n, b"x" * size, b"", b"", b"t", b"l") for n, size in enumerate(sizes)
        ]
        with closing(server), closing(client):
            assert all(client.send(message) for message in sent)
            received: list[Message] = []
            while len(received) < len(sent) and poll([server, client], 5.0):
                received += server.receive()
            assert received == sent


def test_a_wrong_key_is_refused_in_words_on_both_sides(guarded: Guarded) -> None:
    error = failing_to_connect(guarded.listener, "another key of the tests")
    assert isinstance(error, SettingsError)
    assert "set the same SSD_CLUSTER_KEY" in str(error)
    assert guarded.refused == ["127.0.0.1: it does not know the key (SSD_CLUSTER_KEY)"]


@pytest.mark.parametrize("key", ["", "too short"])
def test_tcp_always_has_a_key(guarded: Guarded, key: str) -> None:
    with pytest.raises(SettingsError, match="needs a key that both ends know: set SSD_CLUSTER_KEY"):
        connect(guarded.listener.address, key=key)
    with pytest.raises(SettingsError, match="SSD_CLUSTER_KEY"):
        Listener.tcp("127.0.0.1", 0, key)


def test_a_listener_that_does_not_know_the_key_is_not_believed() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def pretend() -> None:
            connection = server.accept()[0]
            connection.sendall(b"ssd-tcp1" + bytes(32))
            answer = connection.recv(64, socket.MSG_WAITALL)
            connection.sendall(answer[32:])  # the connector's own proof, sent back
            connection.close()

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(SettingsError, match="does not know the key"):
            connect(f"tcp://127.0.0.1:{server.getsockname()[1]}", key=KEY)
        thread.join()


def test_something_else_that_listens_there_is_named_so() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"220 mail.example.org ready" * 9)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(SettingsError, match="no process of ssd-serve"):
            connect(f"tcp://127.0.0.1:{server.getsockname()[1]}", key=KEY)
        thread.join()


def test_silent_and_slow_strangers_keep_nobody_waiting(guarded: Guarded) -> None:
    strangers = [guarded.stranger() for _ in range(5)]
    strangers[0].send(b"x" * 10)
    began = time.monotonic()
    assert guarded.listener.accept() is None
    server, client = meet(guarded.listener)
    assert time.monotonic() - began < 2.0
    for channel in (server, client):
        channel.close()
    for stranger in strangers:
        stranger.close()


def test_a_stranger_who_stays_silent_is_sent_away() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        refused: list[str] = []
        server.setblocking(False)
        gate = Gate(server, KEY, refused.append, patience_s=0.2)
        with closing(gate), closing(socket.create_connection(server.getsockname())) as stranger:
            deadline = time.monotonic() + 5.0
            while not refused and time.monotonic() < deadline:
                assert gate.accept() is None
                time.sleep(0.02)
            assert refused == ["127.0.0.1: it did not prove in time that it knows the key"]
            assert len(stranger.recv(100)) == 40
            assert stranger.recv(1) == b""


def test_more_strangers_than_are_greeted_wake_nobody_up() -> None:
    with closing(socket.create_server(("127.0.0.1", 0), backlog=100)) as server, ExitStack() as strangers:
        server.setblocking(False)
        gate = Gate(server, KEY, lambda _why: None, patience_s=0.5)
        with closing(gate):
            for _ in range(70):
                strangers.enter_context(closing(socket.create_connection(server.getsockname())))
            assert gate.accept() is None
            assert select.select([gate], [], [], 0.1)[0] == []
            time.sleep(0.5)
            assert gate.accept() is None
            assert select.select([gate], [], [], 0.1)[0], "the others have their turn"


def test_one_for_whom_there_is_no_descriptor_ends_nothing(guarded: Guarded) -> None:
    with closing(guarded.stranger()):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        spare = os.dup(0)
        os.close(spare)
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
        try:
            assert guarded.listener.accept() is None
            assert not guarded.listener.wait(0.05), "it wakes nobody up"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    server, client = meet(guarded.listener)
    server.close()
    client.close()


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n" * 8, bytes(64), b"\xff" * 100_000])
def test_garbage_is_refused_after_a_few_bytes(guarded: Guarded, garbage: bytes) -> None:
    with closing(guarded.stranger()) as stranger:
        stranger.send(garbage)
        guarded.until_refused(1)
    assert "does not know the key" in guarded.refused[0]


def test_a_stranger_who_leaves_is_forgotten(guarded: Guarded) -> None:
    guarded.stranger().close()
    guarded.until_refused(1)
    assert "left before it proved" in guarded.refused[0]


def test_an_answer_heard_on_the_wire_opens_nothing(guarded: Guarded) -> None:
    with closing(guarded.stranger()) as first, closing(guarded.stranger()) as second:
        assert guarded.listener.accept() is None
        heard = [connection.recv(40, socket.MSG_WAITALL) for connection in (first, second)]
        assert heard[0] != heard[1]


def test_a_frame_that_is_too_large_closes_the_channel(guarded: Guarded) -> None:
    server, client = meet(guarded.listener)
    with closing(server), closing(client), socket.socket(fileno=client.fileno()) as raw:
        raw.send(b"\xff\xff\xff\xff and more")
        assert server.wait(5.0)
        with pytest.raises(ProtocolError, match="larger than the limit"):
            server.receive()
        assert server.closed
        raw.detach()


def test_a_listener_that_greets_nobody_is_waited_for_until_the_deadline(guarded: Guarded) -> None:
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match="it does not speak"):
        connect(guarded.listener.address, 0.3, key=KEY)
    with pytest.raises(EngineDeadError):
        connect(guarded.listener.address, 60.0, key=KEY, give_up=lambda: True)
    assert time.monotonic() - began < 3.0


def test_nobody_there_and_no_address() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(EngineDeadError, match="nobody answers at tcp://"):
        connect(address, 0.1, key=KEY)
    with pytest.raises(SettingsError, match="must look like tcp://"):
        connect("tcp://nothing", key=KEY)
    with pytest.raises(SettingsError, match="must look like tcp://"):
        connect("tcp://127.0.0.1:65536", key=KEY)
    with pytest.raises(EngineDeadError, match="cannot connect to tcp://"):
        connect(f"tcp://{'x' * 80}:4711", key=KEY)
    with pytest.raises(SettingsError, match="cannot listen on 192"):
        Listener.tcp("192.0.2.1", 0, KEY)
