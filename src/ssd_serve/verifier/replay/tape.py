"""The file of a recorded session: what the verifier heard and was asked, in order, and what it decided.

A tape is pages: a length, a checksum, and a msgpack `Page` of many entries. An entry is a kind and a number,
and for some kinds a message. Pages are only appended: a crash loses at most the last one. Knows files and
messages; not who records or replays, and not what the numbers mean.
"""

import os
import struct
import time
import zlib
from array import array
from collections.abc import Callable, Generator
from enum import IntEnum
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from ssd_serve.base.draft_messages import Message, Refusal
from ssd_serve.base.errors import PermissionProblemError, ProtocolError, RecordingError
from ssd_serve.base.messages import Decided

Answer = TypeVar("Answer", bool, float)

FORMAT = 4
TAPE, HEADER = "tape.msgpack", "header.json"
MAX_PAGE_BYTES = 1 << 30

_FLUSH_EVERY_S = 0.2
_FRAME = struct.Struct("<II")


class Kind(IntEnum):
    """What an entry is: an answer from outside, something that the engine did, or something that it was made
    to do."""

    CLOCK = 1
    """A clock's seconds."""
    POLLED = 2
    """Whether a drafter had something to say."""
    TAKEN = 3
    """Whether a channel took a message."""
    FLUSHED = 4
    CLOSED = 5
    HEARD = 6
    """How many messages a channel gave; they follow in `said`."""
    BROKEN = 7
    """A channel broke the protocol; a `Refusal` in `said` says how."""
    CAPTURED = 8
    """Whether a forward was captured first, as GPUs capture them."""
    READY = 9
    ENDED = 10
    """The clock when a forward was over."""
    ROUND = 20
    """What a round decided: a `RoundTrace` in `said`."""
    SHORT = 21
    """A device had too little memory for a round; a `Refusal` in `said` says what it said."""
    ASKED = 30
    """The engine was asked for something by a message in `said`."""
    TURN = 31
    """The engine had a `Turn`."""
    CONNECT = 32
    """A drafter has connected; a `Connection` in `said`."""
    FULL = 40
    """The recording has reached its limit."""


class Connection(msgspec.Struct, frozen=True, tag=True):
    """How a drafter has connected. `elsewhere`: from another machine, whose address is not kept."""

    synchronous: bool
    stranger: bool
    elsewhere: bool


class ChunkTrace(msgspec.Struct, frozen=True, array_like=True):
    """What a round decided for one request."""

    request: int
    position: int
    """Of the first token that was committed, or would have been."""
    rows: int
    """Rows of the request's own text."""
    nodes: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: int
    tokens: tuple[int, ...]


class RoundTrace(msgspec.Struct, frozen=True, tag=True):
    """What a round decided, request by request."""

    parts: tuple[ChunkTrace, ...]
    decision: Decided | None = None
    """Why it had these nodes; for people, and compared with nothing. None where it is not told."""


Said = Message | RoundTrace | Connection


class Page(msgspec.Struct, frozen=True, array_like=True):
    """Entries: `kinds` (u8), `values` (f64), and what some of them said, in order."""

    kinds: bytes
    values: bytes
    said: list[Said]


class TapeWriter:
    """Appends entries to a new file that nobody else may read. At `max_bytes`, or when the file cannot be
    written, it stops and says so once to `on_stop`."""

    def __init__(self, path: Path, max_bytes: int, on_stop: Callable[[str], None]) -> None:
        try:
            self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600)
        except OSError as error:
            raise PermissionProblemError(f"cannot write {path}: {error.strerror}") from error
        self._max_bytes = max_bytes
        self._on_stop = on_stop
        self._stopped = False
        self._flushed_at = time.perf_counter()
        self._kinds = bytearray()
        self._values = array("d")
        self._said: list[Said] = []
        self._bytes = 0

    def note(self, kind: Kind, value: float = 0.0) -> None:
        """Append an entry."""
        self._kinds.append(kind)
        self._values.append(value)

    def say(self, kind: Kind, message: Said) -> None:
        """Append an entry with what was said."""
        self.note(kind)
        self._said.append(message)

    def answer(self, kind: Kind, value: Answer) -> Answer:
        """Append an answer, and give it back."""
        self._kinds.append(kind)
        self._values.append(value)
        return value

    def messages(self, receive: Callable[[], list[Message]]) -> list[Message]:
        """Append what a channel gives, or the `ProtocolError` that it raises, and give it back."""
        try:
            messages = receive()
        except ProtocolError as error:
            self.say(Kind.BROKEN, Refusal(str(error)))
            raise
        self.note(Kind.HEARD, len(messages))
        self._said.extend(messages)
        return messages

    def connected(self, connection: Connection) -> None:
        """Append that a drafter has connected."""
        self.say(Kind.CONNECT, connection)

    def flush_when_due(self) -> None:
        """`flush`, five times a second."""
        if time.perf_counter() - self._flushed_at >= _FLUSH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write what was noted since the last time."""
        self._flushed_at = time.perf_counter()
        if self._kinds and not self._stopped:
            self._write()
        self._kinds.clear()
        del self._values[:]
        self._said.clear()

    def _write(self) -> None:
        if self._bytes > self._max_bytes:
            self.note(Kind.FULL)
            self.stop(f"it has reached {self._max_bytes >> 20} MiB")
        frame = framed(Page(bytes(self._kinds), self._values.tobytes(), self._said))
        try:
            written = os.write(self._file, frame)
        except OSError as error:
            self.stop(f"it cannot be written: {error.strerror}")
            return
        self._bytes += written
        if written < len(frame):
            self.stop("it cannot be written whole: the disk is full")

    def stop(self, why: str) -> None:
        """Write nothing more, and say why."""
        self._stopped = True
        self._on_stop(why)


class TapeReader:
    """Gives the entries of a file back, in order."""

    def __init__(self, path: Path) -> None:
        self._pages = read_pages(path)
        self._said: list[Said] = []
        self._kinds = b""
        self._values = array("d")
        self._at = self._said_at = 0
        self.cut = False
        """Whether the file ends within a page."""
        self.full = False
        """Whether recording stopped at its limit."""

    def next_kind(self) -> Kind | None:
        """The kind of the next entry; None at the end."""
        while self._at >= len(self._kinds):
            page = next(self._pages, None)
            if page is None or page == "cut":
                self.cut = self.cut or page == "cut"
                return None
            self._kinds, self._said = page.kinds, page.said
            self._values = array("d")
            self._values.frombytes(page.values)
            self._at = self._said_at = 0
        kind = Kind(self._kinds[self._at])
        if kind is Kind.FULL:
            self.full = True
            return None
        return kind

    def take(self) -> float:
        """The number of the entry that `next_kind` told of, which is done with."""
        self._at += 1
        return self._values[self._at - 1]

    def said(self) -> Said:
        """The next of what was said."""
        self._said_at += 1
        return self._said[self._said_at - 1]


def framed(page: Page) -> bytes:
    """A page as it is written."""
    body = msgspec.msgpack.encode(page)
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def read_pages(path: Path) -> Generator[Page | Literal["cut"]]:
    """Whole pages, and 'cut' where the file ends within one. One that is whole and wrong is an error."""
    decoder = msgspec.msgpack.Decoder(Page)
    try:
        file = path.open("rb")
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {error.strerror}") from error
    with file:
        while head := file.read(_FRAME.size):
            at = file.tell() - len(head)
            length, checksum = _FRAME.unpack(head) if len(head) == _FRAME.size else (0, 0)
            body = file.read(length) if 0 < length <= MAX_PAGE_BYTES else b""
            if not body or len(body) < length:
                yield "cut"
                return
            if zlib.crc32(body) != checksum:
                raise RecordingError(f"{path} is damaged at byte {at}: record the session again")
            try:
                yield decoder.decode(body)
            except msgspec.MsgspecError as error:
                raise RecordingError(f"{path} holds what this version does not know: {error}") from error
