"""TCP channels: who knows the key may speak, and nobody who does not can disturb the others."""

import contextlib
import os
import resource
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ssd_serve.cluster.channels.channel import SocketChannel
from ssd_serve.cluster.channels.handshake import KeyGate
from ssd_serve.cluster.channels.listener import Listener, connect
from ssd_serve.cluster.channels.polling import poll
from ssd_serve.cluster.channels.tls import Sealed, identity
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


def answering(answer: Callable[[socket.socket], None]) -> "tuple[socket.socket, threading.Thread]":
    """Something that listens on loopback, and does this to the first who comes."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with server.accept()[0] as connection, contextlib.suppress(OSError):
            answer(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    return server, thread


def address_of(server: socket.socket) -> str:
    return f"tcp://127.0.0.1:{server.getsockname()[1]}"


def test_a_listener_that_has_another_key_is_not_believed_and_learns_nothing_of_ours() -> None:
    heard: list[str] = []

    def pretend(connection: socket.socket) -> None:
        context = identity("another key of the tests").listening
        context.verify_mode = ssl.CERT_NONE
        try:
            context.wrap_socket(connection, server_side=True).recv(1)
        except ssl.SSLError as error:
            heard.append(error.reason)

    server, thread = answering(pretend)
    with closing(server), pytest.raises(SettingsError, match="has another key: set the same SSD_CLUSTER_KEY"):
        connect(address_of(server), key=KEY)
    thread.join()
    # It left before it showed its own certificate, against which keys could be guessed.
    assert heard == ["TLSV1_ALERT_UNKNOWN_CA"]


def test_a_connector_whose_words_are_sent_back_to_it_believes_nobody() -> None:
    def echo(connection: socket.socket) -> None:
        while said := connection.recv(4096):
            connection.sendall(said)

    server, thread = answering(echo)
    with closing(server), pytest.raises(SettingsError, match="no process of ssd-serve"):
        connect(address_of(server), key=KEY)
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
        gate = KeyGate(server, identity(KEY), refused.append, patience_s=0.2)
        with closing(gate), closing(socket.create_connection(server.getsockname())) as stranger:
            deadline = time.monotonic() + 5.0
            while not refused and time.monotonic() < deadline:
                assert gate.accept() is None
                time.sleep(0.02)
            assert refused == ["127.0.0.1: it did not prove in time that it knows the key"]
            assert stranger.recv(1) == b""


@pytest.fixture
def crowded() -> Iterator[tuple[KeyGate, tuple[str, int], list[str]]]:
    """A gate on all of loopback, where it listens, and whom it has refused."""
    refused: list[str] = []
    with closing(socket.create_server(("0.0.0.0", 0), backlog=200)) as server:
        server.setblocking(False)
        with closing(KeyGate(server, identity(KEY), refused.append, patience_s=60.0)) as gate:
            yield gate, ("127.0.0.1", server.getsockname()[1]), refused


def wake(gate: KeyGate) -> None:
    """Let it greet until it has nothing more to do."""
    while select.select([gate], [], [], 0.05)[0]:
        assert gate.accept() is None


def test_silent_strangers_make_room_for_those_who_come_and_wake_nobody_up(
    crowded: tuple[KeyGate, tuple[str, int], list[str]],
) -> None:
    gate, address, refused = crowded
    with ExitStack() as stack:
        strangers = [stack.enter_context(closing(socket.create_connection(address))) for _ in range(70)]
        wake(gate)
        assert refused == ["127.0.0.1: it was silent, and others came"] * 6
        assert [stranger.recv(1) for stranger in strangers[:6]] == [b""] * 6, "the oldest"
        strangers[6].setblocking(False)
        with pytest.raises(BlockingIOError):
            strangers[6].recv(1)


def test_a_crowd_from_one_address_crowds_out_itself(
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


def test_a_crowd_takes_little_of_a_round(crowded: tuple[KeyGate, tuple[str, int], list[str]]) -> None:
    gate, address, _ = crowded
    with ExitStack() as stack:
        hello = Recorded()
        Sealed(identity(KEY), listening=False).shake(b"", hello.add)
        for _ in range(64):
            stack.enter_context(closing(socket.create_connection(address))).sendall(hello.data)
        calls = 0
        while select.select([gate], [], [], 0.05)[0]:
            assert gate.accept() is None
            calls += 1
        assert calls >= 64 / 8


class Recorded:
    def __init__(self) -> None:
        self.data = b""

    def add(self, data: bytes) -> None:
        self.data += data


def test_peers_who_prove_themselves_at_once_are_all_let_in(guarded: Guarded) -> None:
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


def test_a_hello_without_end_is_refused(guarded: Guarded) -> None:
    with closing(guarded.stranger()) as stranger:
        # A handshake message that announces the most bytes, in records of full size.
        records = b"\x16\x03\x01\x40\x00" + b"\x01\x01\xf0\x00" + bytes(16380)
        with contextlib.suppress(OSError):
            stranger.sendall(records + (b"\x16\x03\x01\x40\x00" + bytes(16384)) * 3)
        guarded.until_refused(1)
    assert "does not know the key" in guarded.refused[0]


def test_what_was_heard_on_the_wire_opens_nothing(guarded: Guarded) -> None:
    """Every word that a connector said, said again by somebody else."""
    said = Recorded()
    with closing(socket.create_server(("127.0.0.1", 0))) as between:

        def relay() -> None:
            with between.accept()[0] as connector, guarded.stranger() as listener:
                ends = {connector: listener, listener: connector}
                while True:
                    for end in select.select(list(ends), [], [], 5.0)[0]:
                        data = end.recv(65536)
                        if not data:
                            return
                        if end is connector:
                            said.add(data)
                        ends[end].sendall(data)

        relaying = threading.Thread(target=relay)
        relaying.start()
        connecting = threading.Thread(target=lambda: connect(address_of(between), key=KEY).close())
        connecting.start()
        server = guarded.listener.await_peer(10.0)
        assert server is not None
        server.close()
        connecting.join()
        relaying.join()
    assert len(said.data) > 200
    with closing(guarded.stranger()) as stranger:
        stranger.sendall(said.data)
        guarded.until_refused(1)
    assert guarded.refused == ["127.0.0.1: it does not know the key (SSD_CLUSTER_KEY)"]


def test_what_is_slipped_in_between_ends_the_channel(guarded: Guarded) -> None:
    server, client = meet(guarded.listener)
    with closing(server), closing(client):
        assert client.send(Abort(1))
        assert server.wait(5.0)
        assert server.receive() == [Abort(1)]
        with socket.socket(fileno=os.dup(client.fileno())) as raw:
            raw.send(b"\x17\x03\x03\x00\x20" + bytes(32))
        assert server.wait(5.0)
        assert server.receive() == []
        assert server.closed
        assert not server.send(Abort(2))


def test_a_frame_that_is_too_large_closes_the_channel() -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(end) for end in socket.socketpair())
        liar, channel = shaken(first, second)
        first.sendall(liar.seal(b"\xff\xff\xff\xff and more"))
        assert channel.wait(5.0)
        with pytest.raises(ProtocolError, match="larger than the limit"):
            channel.receive()
        assert channel.closed


def shaken(first: socket.socket, second: socket.socket) -> tuple[Sealed, SocketChannel]:
    """An end that says what it likes, and a channel that listens to it."""
    liar, honest = (Sealed(identity(KEY), listening=listening) for listening in (False, True))
    received = b""
    while not (done := liar.shake(received, first.sendall)):
        honest.shake(second.recv(65536), second.sendall)
        received = first.recv(65536)
    assert done
    return liar, SocketChannel(second, sealed=honest)


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
