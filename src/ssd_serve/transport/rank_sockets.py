"""How rank 0 of a group of processes reaches the others: one unix socket each, messages of any bytes.

Messages to all other ranks go out in turn; the answers say only that a rank is ready. Sockets instead of a
collective operation, because an idle rank may wait for hours, and hears at once when rank 0 is gone. Knows
bytes and ranks, not what is computed.
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
_JOINING = struct.Struct("<BQ")
"""Which rank, and how much memory its device has free."""
_MAX_BYTES = 1 << 32
"""Of a message: no batch is larger."""
_JOIN_S = 120.0
"""Processes start together, but importing takes a while on a busy core."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """Where the ranks of one target meet, in the private folder of a run."""

    folder: Path

    @property
    def socket(self) -> Path:
        """Where rank 0 listens for the others."""
        return self.folder / "ranks.sock"

    @property
    def store(self) -> Path:
        """The file through which they find each other's collective operations."""
        return self.folder / "ranks.store"

    @property
    def pulse(self) -> Path:
        """Where their signs of life are heard."""
        return self.folder / "pulse.sock"

    def remove(self) -> None:
        """Remove all of them."""
        for path in (self.socket, self.store, self.pulse):
            path.unlink(missing_ok=True)


class _Wire:
    """Whole messages over a stream socket. Blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._socket = connection

    def send(self, message: bytes) -> bool:
        """Send all of it; False: the peer is gone."""
        try:
            self._socket.sendall(_LENGTH.pack(len(message)) + message)
        except OSError:
            return False
        return True

    def receive(self) -> bytearray | None:
        """The next message; None when the peer is gone, or says what no rank would say."""
        header = self._exactly(_LENGTH.size)
        length = None if header is None else int(_LENGTH.unpack(header)[0])
        return None if length is None or length > _MAX_BYTES else self._exactly(length)

    def close(self) -> None:
        """The peer hears that nothing more will come."""
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
    """Rank 0's side of the connections to ranks 1, 2, ...; `min_free`: bytes that each of them has free."""

    def __init__(self, wires: list[_Wire], min_free: int) -> None:
        self._wires = wires
        self.min_free = min_free

    @classmethod
    def meet(cls, listener: Listener, ranks: int, timeout_s: float = _JOIN_S) -> "Leader":
        """Wait until all others have connected."""
        found: dict[int, _Wire] = {}
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
                wire = stack.enter_context(closing(_Wire(connection)))
                said = wire.receive()
                rank, memory = _JOINING.unpack(said) if said and len(said) == _JOINING.size else (0, 0)
                if not 0 < rank < ranks or rank in found:
                    raise ProtocolError("a process that is no rank of this target has connected to it")
                found[rank] = wire
                free.append(memory)
            stack.pop_all()
        return cls([found[rank] for rank in sorted(found)], min(free))

    def tell(self, message: bytes) -> None:
        """Send to all others. Raises `RankLostError`."""
        for rank, wire in enumerate(self._wires, start=1):
            if not wire.send(message):
                raise RankLostError(f"rank {rank} of the target is gone")

    def await_ready(self) -> None:
        """Wait until all others have said so, however long they load. Raises `RankLostError`."""
        for rank, wire in enumerate(self._wires, start=1):
            if wire.receive() is None:
                raise RankLostError(f"rank {rank} of the target has ended while it was loading")

    def close(self) -> None:
        """Let all others go."""
        for wire in self._wires:
            wire.close()


class Follower:
    """Another rank's side of its connection to rank 0."""

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire

    @classmethod
    def connect(cls, path: Path, rank: int, free: int, timeout_s: float = _JOIN_S) -> "Follower":
        """Connect to rank 0, once it listens; `free` bytes are free on this rank's device. Raises
        `EngineDeadError`."""
        wire = _Wire(connect_socket(str(path), timeout_s))
        wire.send(_JOINING.pack(rank, free))
        return cls(wire)

    def say_ready(self) -> None:
        self._wire.send(b"ready")

    def hear(self) -> bytearray | None:
        """The next message; None when rank 0 is gone."""
        return self._wire.receive()

    def close(self) -> None:
        """Close this rank's sockets."""
        self._wire.close()
