"""Decodes JSON of any size in slices of 64 KiB, because a decoder holds the GIL during each call.

Only the calls that find where the parts of a value end read more at once.
"""

from collections.abc import Iterator

import msgspec

from ssd_serve.server.errors import ApiError, bad_request

SLICE = 1 << 16
MAX_TEXT_BYTES = 16 * 2**20
"""Limit for all strings of a body in Python's memory, where one wide character makes its string 4 times as
large."""

_DEEPEST = 8
"""Nesting of lists and objects longer than a slice; each level is scanned once more for each level above."""

_LONGEST_CHARACTER = 12
"""Bytes of an escaped surrogate pair."""

Raw = bytes | bytearray | msgspec.Raw

_read_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_read_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


def parts_of_object(raw: Raw) -> dict[str, msgspec.Raw]:
    """Return the raw JSON of each field; the last one of a repeated field."""
    try:
        return _read_object(raw)
    except msgspec.ValidationError:
        raise bad_request("body: input should be an object", code="invalid_value") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _no_json(error) from None


def slices(whole: memoryview, size: int = SLICE) -> Iterator[bytes]:
    """Iterate over the bytes in slices."""
    for place in range(0, len(whole), size):
        yield bytes(whole[place : place + size])


def count(raw: Raw, what: tuple[bytes, ...], most: int, size: int = SLICE) -> int:
    """Count these bytes outside strings. Stops above `most`; the count of invalid JSON is arbitrary."""
    found = 0
    for parts, inside in _between_quotes(raw, size):
        outside = b"".join(parts[inside::2])
        found += sum(map(outside.count, what))
        if found > most:
            break
    return found


def count_names(raw: Raw, most: int, size: int = SLICE) -> int:
    """Count the names in all objects; stops above `most`.

    Raises `ApiError` for a name longer than a slice, because decoders build a name in one call.
    """
    found, filled, long = 0, False, False
    for parts, inside in _between_quotes(raw, size):
        found += sum(part.count(b":") for part in parts[inside::2])
        if found > most:
            return found
        if inside and len(parts) == 1:
            filled = True
        elif filled:
            after = parts[inside].strip()
            long = long or after[:1] == b":"
            filled = not after and len(parts) == 1 + inside
    if long:
        raise bad_request("the body has a field with a name of very many characters", code="unknown_field")
    return found


def _between_quotes(raw: Raw, size: int) -> Iterator[tuple[list[bytes], int]]:
    """Yield slices without escapes, split at quotes, and 1 if the first part is in a string, else 0.

    Every other part of a slice is in a string.
    """
    whole, place, inside = memoryview(raw), 0, 0
    while place < len(whole):
        piece = bytes(whole[place : place + size])
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and place + len(piece) < len(whole):
            piece = piece[:-1]  # an escape stays with what it escapes
        place += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield parts, inside
        inside ^= (len(parts) - 1) % 2


class JsonReader:
    """Decodes the values of one body. Raises `ApiError` for invalid JSON and too much text."""

    def __init__(self, size: int = SLICE, max_text: int = MAX_TEXT_BYTES) -> None:
        self._size = size
        self._max_text = max_text
        self._text = 0

    def read(self, raw: Raw, depth: int = 0) -> object:
        """Return the decoded value."""
        whole = memoryview(raw)
        if len(whole) <= self._size:
            try:
                value = msgspec.json.decode(raw)
                size = _text_bytes(value)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise _no_json(error) from None
            self._keep(size)
            return value
        if depth == _DEEPEST:
            raise bad_request(
                "the body is not JSON that can be read: it is nested too deeply", code="invalid_json"
            )
        begin = bytes(whole[:1])
        try:
            if begin == b"{":
                return {name: self.read(part, depth + 1) for name, part in _read_object(raw).items()}
            if begin == b"[":
                return [self.read(part, depth + 1) for part in _read_list(raw)]
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise _no_json(error) from None
        if begin == b'"':
            return self._read_text(whole)
        raise bad_request(
            "the body is not JSON that can be read: a number has too many digits", code="invalid_json"
        )

    def _read_text(self, whole: memoryview) -> str:
        pieces: list[str] = []
        place, end, length, widest = 1, len(whole) - 1, 0, 1
        while place < end:
            piece, taken = _beginning(
                bytes(whole[place : min(place + self._size, end)]), place + self._size < end
            )
            pieces.append(piece)
            place += taken
            length += len(piece)
            widest = max(widest, _width(piece))
            if self._text + length * widest > self._max_text:
                break
        self._keep(length * widest)
        return "".join(pieces)

    def _keep(self, size: int) -> None:
        self._text += size
        if self._text > self._max_text:
            message = (
                f"the texts of the body take more than {self._max_text} bytes; where a text has characters "
                "beyond U+00FF each of its characters takes two, with an emoji four"
            )
            raise ApiError(413, message, code="body_too_large")


def _beginning(inside: bytes, more: bool) -> tuple[str, int]:
    """Decode the bytes between quotes; return the text and the count of decoded bytes.

    If `more` bytes follow, a character that is cut at the end is left out.
    """
    cut = 0
    while True:
        piece = inside[: len(inside) - cut]
        try:
            return msgspec.json.decode(b'"%s"' % piece, type=str), len(piece)
        except (msgspec.MsgspecError, ValueError) as error:
            cut += 1
            if not more or cut == min(_LONGEST_CHARACTER, len(inside)):
                raise _no_json(error) from None


def _width(text: str) -> int:
    """Return the bytes of each character in Python's memory."""
    if text.isascii():
        return 1
    widest = max(text)
    return 1 if widest <= "\xff" else 2 if widest <= "\uffff" else 4


def _text_bytes(value: object) -> int:
    if isinstance(value, str):
        return len(value) * _width(value)
    if isinstance(value, list):
        return sum(map(_text_bytes, value))
    if isinstance(value, dict):
        return sum(map(_text_bytes, value.values()))
    return 0


def _no_json(error: Exception) -> ApiError:
    return bad_request(f"the body is not JSON: {error}", code="invalid_json")
