"""TLS peers for tests: a listener, raw connections, and handshakes without sockets."""

import os
import resource
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

from ssd_serve.transport.channel import SocketChannel
from ssd_serve.transport.listener import Listener, connect
from ssd_serve.transport.tls import TlsStream, identity

KEY = "a key of the tests"


class Guarded:
    """A listener that records refusals."""

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


def meet(listener: Listener) -> tuple[SocketChannel, SocketChannel]:
    """Both ends of one channel; the connector is a thread, as it blocks."""
    ends: list[SocketChannel] = []
    thread = threading.Thread(target=lambda: ends.append(connect(listener.address, key=KEY)))
    thread.start()
    server = listener.await_peer(10.0)
    thread.join()
    assert server is not None
    return server, ends[0]


@contextmanager
def no_descriptor_left() -> Generator[None]:
    """Exhaust the descriptors: every free one is beyond the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.dup(0)
    os.close(spare)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Heard:
    """Bytes in the order in which they came."""

    def __init__(self) -> None:
        self.data = b""

    def add(self, data: bytes) -> None:
        self.data += data


def shaken_pair() -> tuple[TlsStream, TlsStream]:
    """A connector and a listener that have shaken hands."""
    connector, listener = TlsStream(identity(KEY), listening=False), TlsStream(identity(KEY), listening=True)
    assert met(connector, listener) == (True, True)
    return connector, listener


def met(connector: TlsStream, listener: TlsStream, part: int = 1 << 20) -> tuple[bool, bool]:
    """Run a handshake in parts of `part` bytes; returns which end has finished."""
    over = {connector: False, listener: False}
    peers = {connector: listener, listener: connector}
    waiting: dict[TlsStream, bytearray] = {connector: bytearray(), listener: bytearray()}
    over[connector] = connector.handshake(b"", waiting[listener].extend)
    while any(waiting.values()):
        for end, data in waiting.items():
            portion = bytes(data[:part])
            del data[:part]
            if portion and not over[end]:
                over[end] = end.handshake(portion, waiting[peers[end]].extend)
    return over[connector], over[listener]
