"""The engine and the clients of the experiment, each a process.

The engine gives every request its next tokens at the same moment, as a round does. The clients count tokens
and when they come; nothing else of them is read, so that one core is enough for both.
"""

import os
import select
import socket
import time
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import msgspec
from msgspec.structs import replace

from ssd_serve.cluster.channels.channel import SocketChannel
from ssd_serve.messages import (
    Committed,
    Finished,
    Submit,
    SubmitChoices,
)
from tests.server.fakes import FIGURES, READY

PATH = "/v1/chat/completions"
_SETTLES_S = 0.3
MARK = " the"
"""The text of every token."""


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """So many streams, each given so many tokens a round, so many tokens a second in all."""

    streams: int
    tokens_per_round: int
    tokens_per_s: float
    seconds: float

    @property
    def period_s(self) -> float:
        """Of a round."""
        return self.streams * self.tokens_per_round / self.tokens_per_s

    @property
    def rounds(self) -> int:
        """Of the whole trial."""
        return max(8, round(self.seconds / self.period_s))


@dataclass(frozen=True, slots=True)
class Seen:
    """What the clients saw."""

    tokens: int
    seconds: float
    """From the first round to the last token."""
    late_ms: Sequence[float]
    """Of every round of every stream, when it was there."""


def play_engine(
    channel: SocketChannel,
    core: int,
    vocabulary: int,
    token: int,
    load: StreamLoad,
    sent_at: MutableSequence[float],
) -> None:
    """Wait for all streams, then play the rounds; `sent_at` gets the moment of each."""
    os.sched_setaffinity(0, {core})
    channel.send(replace(READY, vocabulary=vocabulary, context=1 << 20))
    requests: list[int] = []
    while len(requests) < load.streams:
        requests += _submitted(channel)
        channel.wait(0.05)
    time.sleep(_SETTLES_S)
    given = (token,) * load.tokens_per_round
    begun = time.monotonic()
    for index in range(load.rounds):
        time.sleep(max(0.0, begun + index * load.period_s - time.monotonic()))
        sent_at[index] = time.monotonic()
        for request in requests:
            channel.post(Committed(request, given))
        _flush(channel)
    for request in requests:
        channel.post(Finished(request, "length", FIGURES))
    _flush(channel)
    while not channel.closed:
        channel.wait(0.1)
        channel.receive()


def _submitted(channel: SocketChannel) -> list[int]:
    found: list[int] = []
    for message in channel.receive():
        if isinstance(message, SubmitChoices):
            found += [each.request for each in message.each()]
        elif isinstance(message, Submit):
            found.append(message.request)
    return found


def _flush(channel: SocketChannel) -> None:
    while not channel.flush() and not channel.closed:
        select.select([], [channel.fileno()], [], 0.1)


@dataclass(slots=True)
class _Stream:
    connection: socket.socket
    tokens: int = 0
    rounds: int = 0
    """Those that are there whole."""
    left: bytes = b""


def play_clients(
    pipe: "Connection[Seen, Seen]", core: int, port: int, load: StreamLoad, sent_at: Sequence[float]
) -> None:
    """Ask for all streams and read them to their ends."""
    os.sched_setaffinity(0, {core})
    body = msgspec.json.encode(
        {
            "messages": [{"role": "user", "content": "Count."}],
            "max_tokens": load.rounds * load.tokens_per_round + 1,
            "stream": True,
        }
    )
    head = f"POST {PATH} HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    streams: dict[int, _Stream] = {}
    waiting = select.epoll()
    for _ in range(load.streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request)
        streams[connection.fileno()] = _Stream(connection)
        waiting.register(connection.fileno(), select.EPOLLIN)
    finished, late_ms, last, mark = 0, list[float](), 0.0, MARK.encode()
    while finished < len(streams):
        for descriptor, _ in waiting.poll():
            stream = streams[descriptor]
            came = stream.connection.recv(1 << 16)
            last = time.monotonic()
            read = stream.left + came
            stream.tokens += read.count(mark)
            whole = stream.tokens // load.tokens_per_round
            late_ms += [1e3 * (last - sent_at[index]) for index in range(stream.rounds, whole)]
            stream.rounds = whole
            if b"[DONE]" in read or not came:
                finished += 1
                waiting.unregister(descriptor)
            stream.left = b"" if read.endswith(mark) else read[-(len(mark) - 1) :]
    pipe.send(Seen(sum(each.tokens for each in streams.values()), last - sent_at[0], late_ms))
