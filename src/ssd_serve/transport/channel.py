"""Typed messages over a connected stream socket, without blocking, and waiting for several of them.

A channel belongs to one thread. It knows frames and bytes, not the meaning of messages.
"""

import contextlib
import os
import select
import socket
import ssl
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ssd_serve.base.draft_messages import Message
from ssd_serve.base.errors import ProtocolError
from ssd_serve.transport.framing import MAX_FRAME_BYTES, FrameReader, FrameWriter
from ssd_serve.transport.tls import TlsStream

DEFAULT_QUEUE_BYTES = 4 * 1024 * 1024
_READ_BYTES = 256 * 1024
_DESCRIPTOR = struct.Struct("i")


@dataclass(frozen=True, slots=True)
class ReceiveLimits:
    """Limits of what a channel accepts from its peer."""

    frame_bytes: int = MAX_FRAME_BYTES
    drain_bytes: int = _READ_BYTES
    """Bytes read by one `receive`, so that a peer that never stops sending cannot block it."""
    kinds: Any = Message
    """Accepted message types."""
    descriptors: bool = False
    """True: file descriptors are accepted on a unix socket."""


DEFAULT_LIMITS = ReceiveLimits()


class Waitable(Protocol):
    """An object that `poll` can wait for."""

    @property
    def pending(self) -> int:
        """Bytes that are still to be sent; 0 for objects that send nothing."""
        ...

    def fileno(self) -> int:
        """File descriptor to poll for reading; -1: none."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to receive or accept, or the connection has ended."""
        ...


class Channel(Waitable, Protocol):
    """Either end of a connection that carries `Message`s. Only `wait` blocks, and it flushes meanwhile."""

    @property
    def closed(self) -> bool:
        """True after the peer has gone or `close`; `receive` still returns messages that arrived before."""
        ...

    def send(self, message: Message) -> bool:
        """Queue a message and send what can be sent now.

        Returns False, without queueing, if the queue is full or the channel is closed.
        """
        ...

    def post(self, message: Message) -> bool:
        """Queue a message for the next `flush` or `send`. False as for `send`."""
        ...

    def flush(self) -> bool:
        """Send what can be sent now; True if nothing is pending."""
        ...

    def receive(self) -> list[Message]:
        """Return the waiting messages in order.

        Raises `ProtocolError` and closes after malformed data; the call before returned the messages before
        it.
        """
        ...

    def close(self) -> None:
        """Close now; pending bytes are dropped."""
        ...


class SocketChannel:
    """A `Channel` over a connected unix or TCP stream socket, which it owns."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        queue_bytes: int = DEFAULT_QUEUE_BYTES,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        limits: ReceiveLimits = DEFAULT_LIMITS,
        tls: TlsStream | None = None,
    ) -> None:
        """`tls` has completed its handshake."""
        connection.setblocking(False)
        self.peer = _address_of(connection)
        """The peer's IP address; empty on a unix socket."""
        self._socket = connection
        self._queue_bytes = queue_bytes
        self._outgoing = bytearray()
        self._writer = FrameWriter(max_frame_bytes)
        self._reader = FrameReader(min(max_frame_bytes, limits.frame_bytes), limits.kinds)
        self._drain_bytes = limits.drain_bytes
        self._chunk = bytearray(min(_READ_BYTES, limits.drain_bytes))
        self._local = connection.family == socket.AF_UNIX and tls is None
        self._takes_descriptors = limits.descriptors and self._local and sys.platform == "linux"
        self._descriptor = -1
        self._ended = False
        self._tls = tls
        if tls is not None:
            self._feed(b"")  # data that arrived with the end of the handshake

    @property
    def closed(self) -> bool:
        return self._ended

    @property
    def pending(self) -> int:
        return len(self._outgoing)

    def send(self, message: Message) -> bool:
        """See `Channel`. Raises `ProtocolError` for a message that is too large; the channel stays open."""
        if not self.post(message):
            return False
        self.flush()
        return not self._ended

    def post(self, message: Message) -> bool:
        if self._ended:
            return False
        if len(self._outgoing) > self._queue_bytes:
            self.flush()
            if self._ended or len(self._outgoing) > self._queue_bytes:
                return False
        frame = self._writer.encode(message)
        try:
            self._outgoing += frame if self._tls is None else self._tls.encrypt(frame)
        except ssl.SSLError:
            self._ended = True
        return not self._ended

    def send_with(self, message: Message, descriptor: int) -> bool:
        """Send a message with a file descriptor, which the peer receives with it or before.

        Returns False over TCP and while bytes are pending.
        """
        if not self._local or self._ended or not self.flush():
            return False
        frame = self._writer.encode(message)
        try:
            sent = socket.send_fds(self._socket, [frame], [descriptor])
        except OSError:
            return False
        self._outgoing += frame[sent:]
        return True

    def take_descriptor(self) -> int:
        """The last received descriptor, which the caller must close; -1: none."""
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor

    def flush(self) -> bool:
        if not self._outgoing:
            return True
        sent = 0
        try:
            # The view must be gone before the buffer is resized.
            with memoryview(self._outgoing) as view:
                while sent < len(view) and not self._ended:
                    sent += self._socket.send(view[sent:])
        except BlockingIOError:
            pass
        except OSError:
            # The peer is gone: read what it sent before, up to the end of the stream.
            self._read_all()
            self._ended = True
        if self._ended:
            self._outgoing.clear()
        else:
            del self._outgoing[:sent]
        return not self._outgoing

    def receive(self) -> list[Message]:
        self._read_all()
        try:
            return self._reader.take()
        except ProtocolError:
            self.close()
            raise

    def _read_all(self) -> None:
        """Move waiting bytes from the kernel into the reader."""
        taken = 0
        while not self._ended and not self._reader.failed and taken < self._drain_bytes:
            try:
                count = self._receive_some()
            except BlockingIOError:
                return
            except OSError:
                count = 0
            if count == 0:
                self._ended = True
                return
            taken += count
            with memoryview(self._chunk) as view:
                self._feed(view[:count])
            if self._reader.failed:
                # Later data is ignored; the next `receive` raises the error.
                self._ended = True
            if count < len(self._chunk) and self._descriptor < 0:
                # A short read without a descriptor means an empty kernel buffer: this saves a call.
                return

    def _receive_some(self) -> int:
        if not self._takes_descriptors:
            return self._socket.recv_into(self._chunk)
        # CMSG_LEN, not CMSG_SPACE: the padding of the latter would hold a second descriptor.
        space, flags = socket.CMSG_LEN(_DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC
        count, ancillary, _, _ = self._socket.recvmsg_into([self._chunk], space, flags)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._drop_descriptor()
                (self._descriptor,) = _DESCRIPTOR.unpack(data[: _DESCRIPTOR.size])
        return count

    def _drop_descriptor(self) -> None:
        descriptor = self.take_descriptor()
        if descriptor >= 0:
            os.close(descriptor)

    def _feed(self, data: bytes | memoryview) -> None:
        try:
            self._reader.feed(data if self._tls is None else self._tls.decrypt(data))
        except ssl.SSLError:
            self._ended = True  # tampered data: the connection is over

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while True:
            if self._reader.ready or self._ended:
                return True
            interest = select.POLLIN | (select.POLLOUT if self._outgoing else 0)
            poller = select.poll()
            poller.register(self._socket, interest)
            events = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not events:
                return False
            if events[0][1] & ~select.POLLOUT:
                return True
            self.flush()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._ended = True
        self._outgoing.clear()
        self._drop_descriptor()
        self._socket.close()


def _address_of(connection: socket.socket) -> str:
    if connection.family == socket.AF_UNIX:
        return ""
    with contextlib.suppress(OSError):  # the peer has gone again
        return str(connection.getpeername()[0])
    return "unknown"


W = TypeVar("W", bound=Waitable)


def poll(sources: Sequence[W], timeout_s: float) -> list[W]:
    """The sources with something to receive or accept, or that have ended, after waiting for the first one.

    Pending bytes are sent meanwhile. An ended channel is returned every time until it is left out of
    `sources`.
    """
    ready = [source for source in sources if source.wait(0.0)]
    deadline = time.monotonic() + timeout_s
    rest = timeout_s  # exactly: channels in memory may have a clock of their own
    while not ready:
        if rest <= 0:
            return []
        poller = select.poll()
        kernel = [source for source in sources if source.fileno() >= 0]
        if not kernel:
            return [source for source in sources if source.wait(rest)]
        for source in kernel:
            poller.register(source.fileno(), select.POLLIN | (select.POLLOUT if source.pending else 0))
        poller.poll(rest * 1000)
        ready = [source for source in sources if source.wait(0.0)]
        rest = deadline - time.monotonic()
    return ready
