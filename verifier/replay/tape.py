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
from typing import Literal

import msgspec

from ssd_serve.errors import PermissionProblemError, RecordingError
from ssd_serve.messages import Decided, Message

FORMAT = 3
TAPE, HEADER = "tape.msgpack", "header.json"
MAX_PAGE_BYTES = 1 << 30

_FLUSH_EVERY_S = 0.2
_FRAME = struct.Struct("<II")


class Kind(IntEnum):
    """What an entry is. The first ones are answers from outside, the last ones calls of the engine."""

    CLOCK = 1
    """A clock's seconds."""
    POLLED = 2
    """Whether a drafter had something to say."""
    TAKEN = 3
    """Whether a channel took a message."""
    FLUSHED = 4
    PENDING = 5
    CLOSED = 6
    HEARD = 7
    """How many messages a channel gave; they follow in `said`."""
    BROKEN = 8
    """A channel broke the protocol; a `Refusal` in `said` says how."""
    READY = 9
    ENDED = 10
    """The clock when a forward was over."""
    ROUND = 11
    """What a round decided: a `RoundTrace` in `said`."""
    FULL = 12
    """The recording has reached its limit."""
    CAPTURED = 13
    """Whether a forward was recorded first, as GPUs record them."""
    SHORT = 14
    """A device had too little memory for a round; a `Refusal` in `said` says what it said."""
    SUBMIT = 20
    ABORT = 21
    FINISH = 22
    STEP = 23
    DRAIN = 24
    BEAT = 25
    CONNECT = 26
    """A drafter has connected; 1: a synchronous one."""


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


class Page(msgspec.Struct, frozen=True, array_like=True):
    """Entries: `kinds` (u8), `values` (f64), and what some of them said, in order."""

    kinds: bytes
    values: bytes
    said: list[Message | RoundTrace]


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
        self._said: list[Message | RoundTrace] = []
        self._bytes = 0

    def note(self, kind: Kind, value: float = 0.0) -> None:
        """Append an entry."""
        self._kinds.append(kind)
        self._values.append(value)

    def say(self, kind: Kind, message: Message | RoundTrace, value: float = 0.0) -> None:
        """Append an entry with what was said."""
        self.note(kind, value)
        self._said.append(message)

    def hear(self, messages: list[Message]) -> None:
        """Append what a channel gave."""
        self.note(Kind.HEARD, len(messages))
        self._said.extend(messages)

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
        self._said: list[Message | RoundTrace] = []
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

    def said(self) -> Message | RoundTrace:
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
