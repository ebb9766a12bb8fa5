"""Connections between rank 0 of a target and the other ranks: one unix socket each, messages of any bytes.

Sockets rather than a collective operation, because an idle rank may wait for hours and must notice at once
that rank 0 is gone. Knows bytes and ranks, not the computation.
"""

import socket
import struct
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from ssd_serve.base.errors import ProtocolError, RankLostError
from ssd_serve.transport.listener import Listener, connect_socket

_LENGTH = struct.Struct("<Q")
_JOIN = struct.Struct("<BQ")
"""The rank and the free bytes of its device."""
_MAX_BYTES = 1 << 32
"""Limit of a message; no batch is larger."""
_JOIN_S = 120.0
"""Timeout of joining: imports are slow on a busy core."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """Files of one target's ranks in the private folder of a run."""

    folder: Path

    @property
    def socket(self) -> Path:
        """The socket on which rank 0 listens."""
        return self.folder / "ranks.sock"

    @property
    def store(self) -> Path:
        """The file store of the collective operations."""
        return self.folder / "ranks.store"

    @property
    def pulse(self) -> Path:
        """The socket of heartbeats."""
        return self.folder / "pulse.sock"

    def remove(self) -> None:
        for path in (self.socket, self.store, self.pulse):
            path.unlink(missing_ok=True)


class _MessageSocket:
    """Whole messages over a blocking stream socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._socket = connection

    def send(self, message: bytes) -> bool:
        """Send a message; False: the peer is gone."""
        try:
            self._socket.sendall(_LENGTH.pack(len(message)) + message)
        except OSError:
            return False
        return True

    def receive(self) -> bytearray | None:
        """The next message; None if the peer is gone or the length is invalid."""
        header = self._exactly(_LENGTH.size)
        length = None if header is None else int(_LENGTH.unpack(header)[0])
        return None if length is None or length > _MAX_BYTES else self._exactly(length)

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, count: int) -> bytearray | None:
        data = bytearray(count)
        with memoryview(data) as view:
            filled = 0
            while filled < count:
                try:
                    taken = self._socket.recv_into(view[filled:])
                except OSError:
                    return None
                if not taken:
                    return None
                filled += taken
        return data


class Leader:
    """Rank 0's connections to the other ranks; `min_free` is the least of their free bytes."""

    def __init__(self, wires: list[_MessageSocket], min_free: int) -> None:
        self._wires = wires
        self.min_free = min_free

    @classmethod
    def accept_all(cls, listener: Listener, ranks: int, timeout_s: float = _JOIN_S) -> "Leader":
        """Accept all other ranks. Raises `RankLostError` if one is missing after the timeout."""
        found: dict[int, _MessageSocket] = {}
        free: list[int] = []
        deadline = time.monotonic() + timeout_s
        with ExitStack() as stack:
            while len(found) < ranks - 1:
                if not listener.wait(max(0.0, deadline - time.monotonic())):
                    missing = ", ".join(str(rank) for rank in range(1, ranks) if rank not in found)
                    raise RankLostError(f"rank {missing} of the target did not come within {timeout_s:.0f} s")
                connection = listener.accept_socket()
                if connection is None:
                    continue
                wire = stack.enter_context(closing(_MessageSocket(connection)))
                joined = wire.receive()
                rank, memory = _JOIN.unpack(joined) if joined and len(joined) == _JOIN.size else (0, 0)
                if not 0 < rank < ranks or rank in found:
                    raise ProtocolError("a process that is no rank of this target has connected to it")
                found[rank] = wire
                free.append(memory)
            stack.pop_all()
        return cls([found[rank] for rank in sorted(found)], min(free))

    def broadcast(self, message: bytes) -> None:
        """Send to all other ranks. Raises `RankLostError`."""
        for rank, wire in enumerate(self._wires, start=1):
            if not wire.send(message):
                raise RankLostError(f"rank {rank} of the target is gone")

    def wait_ready(self) -> None:
        """Wait until all other ranks are ready, without a timeout. Raises `RankLostError`."""
        for rank, wire in enumerate(self._wires, start=1):
            if wire.receive() is None:
                raise RankLostError(f"rank {rank} of the target has ended while it was loading")

    def close(self) -> None:
        for wire in self._wires:
            wire.close()


class Follower(_MessageSocket):
    """Another rank's connection to rank 0; `receive` returns None if rank 0 is gone."""

    @classmethod
    def connect(cls, path: Path, rank: int, free: int, timeout_s: float = _JOIN_S) -> "Follower":
        """Connect to rank 0 and report this device's `free` bytes. Raises `EngineDeadError`."""
        follower = cls(connect_socket(str(path), timeout_s))
        follower.send(_JOIN.pack(rank, free))
        return follower

    def send_ready(self) -> None:
        self.send(b"ready")
