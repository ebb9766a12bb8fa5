"""A worker as the hub sees it, what workers are offered, and how it is found out who they are."""

import asyncio
import os
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ssd_serve.transport.channel import Intake, SocketChannel
from ssd_serve.base.messages import Ready, Status
from ssd_serve.server.engine.event_channel import EngineLine

_CREDENTIALS = struct.Struct("3i")


class WorkersDoor(Protocol):
    """Where workers come in."""

    def accept(self, intake: Intake) -> SocketChannel | None:
        """The next one that has connected, or None."""
        ...


@dataclass(frozen=True, slots=True)
class Post:
    """What workers are offered; see `Hired`."""

    door: WorkersDoor
    pids: Callable[[], Mapping[str, int]]
    """Processes that were started to be workers, by name: nobody else is let in."""
    kill: Callable[[int], None]
    """End a process that hangs."""
    expect_end: Callable[[], None]
    """From now on they may leave."""
    listening: socket.socket
    """The server's."""
    settings: bytes
    folder: Path
    salt_secret: bytes


@dataclass(slots=True, eq=False)
class Seat:
    """One worker."""

    number: int
    channel: SocketChannel
    line: EngineLine
    pid: int | None
    name: str = ""
    begun: bool = False
    pages: dict[int, "asyncio.Future[str]"] = field(default_factory=dict[int, "asyncio.Future[str]"])
    """That it was asked for."""
    requests: set[int] = field(default_factory=set[int])
    ready: Ready | None = None
    """What it was told last, as `status`."""
    status: Status | None = None


def peer_pid(channel: SocketChannel) -> int | None:
    """The process at the other end of a connection of this machine; None where the system does not tell."""
    if sys.platform != "linux":
        return None
    with socket.socket(fileno=os.dup(channel.fileno())) as twin:
        told = twin.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(told)[0]
    return pid
