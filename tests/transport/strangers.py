"""A listener that strangers come to, and both ends of a channel that was let in, for tests."""

import socket
import threading
import time

from ssd_serve.transport.channel import SocketChannel
from ssd_serve.transport.listener import Listener, connect
from tests.transport.shaking import KEY


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


def meet(listener: Listener) -> tuple[SocketChannel, SocketChannel]:
    """Both ends of one channel; the connector is a thread, as it blocks."""
    ends: list[SocketChannel] = []
    thread = threading.Thread(target=lambda: ends.append(connect(listener.address, key=KEY)))
    thread.start()
    server = listener.await_peer(10.0)
    thread.join()
    assert server is not None
    return server, ends[0]


class Heard:
    """Bytes in the order in which they came."""

    def __init__(self) -> None:
        self.data = b""

    def add(self, data: bytes) -> None:
        self.data += data
