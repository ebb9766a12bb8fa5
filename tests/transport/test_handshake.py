"""TCP channels over TLS: only peers that know the key can send or read."""

import contextlib
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import closing

import pytest

from ssd_serve.base.errors import EngineDeadError, SettingsError
from ssd_serve.base.messages import Abort
from ssd_serve.transport.listener import Listener, connect
from ssd_serve.transport.tls import identity
from tests.transport.tls_peers import KEY, Guarded, Heard, meet


def failing_to_connect(listener: Listener, key: str, timeout_s: float = 5.0) -> Exception:
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


def test_a_wrong_key_is_reported_on_both_sides(guarded: Guarded) -> None:
    error = failing_to_connect(guarded.listener, "another key of the tests")
    assert isinstance(error, SettingsError)
    assert "set the same SSD_CLUSTER_KEY" in str(error)
    assert guarded.refused == ["127.0.0.1: the peer does not know the key (SSD_CLUSTER_KEY)"]


@pytest.mark.parametrize("key", ["", "too short"])
def test_tcp_requires_a_strong_key(guarded: Guarded, key: str) -> None:
    with pytest.raises(SettingsError, match="needs a key that both ends know: set SSD_CLUSTER_KEY"):
        connect(guarded.listener.address, key=key)
    with pytest.raises(SettingsError, match="SSD_CLUSTER_KEY"):
        Listener.tcp("127.0.0.1", 0, key)


def answering(answer: Callable[[socket.socket], None]) -> "tuple[socket.socket, threading.Thread]":
    """A loopback server that runs `answer` on its first connection."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with server.accept()[0] as connection, contextlib.suppress(OSError):
            answer(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    return server, thread


def address_of(server: socket.socket) -> str:
    return f"tcp://127.0.0.1:{server.getsockname()[1]}"


def test_connector_shows_no_certificate_to_a_listener_with_another_key() -> None:
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


def test_reflected_handshake_bytes_are_rejected() -> None:
    def echo(connection: socket.socket) -> None:
        while said := connection.recv(4096):
            connection.sendall(said)

    server, thread = answering(echo)
    with closing(server), pytest.raises(SettingsError, match="no process of ssd-serve"):
        connect(address_of(server), key=KEY)
    thread.join()


def test_a_replayed_handshake_is_refused(guarded: Guarded) -> None:
    """Replay all bytes of a valid connector."""
    said = Heard()
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
    assert guarded.refused == ["127.0.0.1: the peer does not know the key (SSD_CLUSTER_KEY)"]


def test_injected_bytes_close_the_channel(guarded: Guarded) -> None:
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


def test_connect_times_out_on_a_silent_listener(guarded: Guarded) -> None:
    with pytest.raises(EngineDeadError, match="the peer is silent"):
        connect(guarded.listener.address, 0.3, key=KEY)
    began = time.monotonic()
    with pytest.raises(EngineDeadError):
        connect(guarded.listener.address, 60.0, key=KEY, give_up=lambda: True)
    assert time.monotonic() - began < 30.0, "it gave up when it was told to"


def test_connect_and_listen_errors_name_the_address() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(EngineDeadError, match="no process answers at tcp://"):
        connect(address, 0.1, key=KEY)
    with pytest.raises(SettingsError, match="must look like tcp://"):
        connect("tcp://nothing", key=KEY)
    with pytest.raises(SettingsError, match="must look like tcp://"):
        connect("tcp://127.0.0.1:65536", key=KEY)
    with pytest.raises(EngineDeadError, match="cannot connect to tcp://"):
        connect(f"tcp://{'x' * 80}:4711", key=KEY)
    with pytest.raises(SettingsError, match="cannot listen on 192"):
        Listener.tcp("192.0.2.1", 0, KEY)
