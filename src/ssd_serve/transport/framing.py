"""Frames on a byte stream: a 4-byte little-endian length, then one msgpack message. Knows no sockets."""

import struct
from typing import Any

import msgspec

from ssd_serve.base.draft_messages import Message
from ssd_serve.base.errors import ProtocolError

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Largest body of one frame; a 128k-token prompt takes under 1 MiB."""

_HEADER = struct.Struct("<I")


class FrameWriter:
    """Encodes messages into frames with one reused encoder."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._max_frame_bytes = max_frame_bytes

    def encode(self, message: Message) -> bytearray:
        """Encode one frame. Raises `ProtocolError` for a message that every peer would reject."""
        frame = bytearray(_HEADER.size)
        try:
            self._encoder.encode_into(message, frame, _HEADER.size)
        except (TypeError, OverflowError, ValueError) as error:
            raise ProtocolError(f"a {type(message).__name__} message cannot be encoded: {error}") from error
        body = len(frame) - _HEADER.size
        if body > self._max_frame_bytes:
            raise ProtocolError(
                f"a {type(message).__name__} message of {body} bytes is larger than the limit of "
                f"{self._max_frame_bytes} bytes"
            )
        _HEADER.pack_into(frame, 0, body)
        return frame


class FrameReader:
    """Collects bytes in portions of any size and returns whole messages.

    After a frame that is too large or does not decode, the stream has lost its framing and nothing more is
    decoded; messages before it are still returned.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES, kinds: Any = Message) -> None:
        """Only messages of the types in `kinds` decode."""
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kinds)
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        self._messages: list[Message] = []
        self._error: str | None = None

    @property
    def ready(self) -> bool:
        """True if `take` would return messages or raise."""
        return bool(self._messages) or self._error is not None

    @property
    def failed(self) -> bool:
        """True if the stream lost its framing."""
        return self._error is not None

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add received bytes and decode complete frames."""
        if self._error is not None:
            return
        self._buffer += data
        position = 0
        with memoryview(self._buffer) as view:
            while self._error is None and len(view) - position >= _HEADER.size:
                (body,) = _HEADER.unpack_from(view, position)
                if body > self._max_frame_bytes:
                    self._error = (
                        f"a frame of {body} bytes is larger than the limit of {self._max_frame_bytes}"
                    )
                    break
                start = position + _HEADER.size
                if len(view) < start + body:
                    break
                self._decode(view[start : start + body])
                position = start + body
        del self._buffer[:position]

    def _decode(self, body: memoryview) -> None:
        try:
            self._messages.append(self._decoder.decode(body))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._error = f"a frame does not decode: {error}"
        except RecursionError:  # the interpreter's limit, which also applies to unknown fields
            self._error = "a frame does not decode: it is nested too deeply"
        except MemoryError:
            self._error = "a frame does not decode: it asks for more memory than there is"
        finally:
            body.release()

    def take(self) -> list[Message]:
        """Return decoded messages. Raises `ProtocolError` when none are left and the stream is broken."""
        if self._messages:
            messages, self._messages = self._messages, []
            return messages
        if self._error is not None:
            raise ProtocolError(f"the peer process broke the protocol: {self._error}")
        return []
