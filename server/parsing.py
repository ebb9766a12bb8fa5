"""From the bytes of a body to its model, at a price that is known before it is paid.

pydantic builds some hundred bytes for each value of a body and an error for each wrong one, in one call that
stops every other thread. So the values of a body are counted before it sees them. Only lists of token ids may
have very many: those of a long body are taken out and read in slices, as references to shared numbers.
Knows the form of bodies, not what they mean; runs on any thread.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, TypeVar

import msgspec
from pydantic import ValidationError

from ssd_serve.server.errors import ApiError, bad_request, from_validation, too_long
from ssd_serve.server.fields import Strict
from ssd_serve.server.limits import MAX_PROMPTS, MAX_TOKEN_ID, MAX_TOKEN_IDS, MAX_VALUES

Body = TypeVar("Body", bound=Strict)

_SLICE = 1 << 16
_STUB = b"[[0]]"
"""Stands in the body for lists that were taken out."""

_read_numbers = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]]).decode
_read_lists = msgspec.json.Decoder(list[msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class TokenNumbers:
    """What token ids may be. `numbers` are all of them, shared: an id of a long list costs a reference."""

    context: int
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, context: int, vocabulary: int) -> "TokenNumbers":
        """Those of a model."""
        return cls(context, tuple(range(vocabulary)))


def parse(raw: bytes | bytearray, model: type[Body], tokens: TokenNumbers, most: int = MAX_VALUES) -> Body:
    """The validated body, or the `ApiError` that says what is wrong with it. pydantic sees `most` values."""
    if values(raw, most) <= most:
        return _validate(raw, model)
    fields = _separate(raw, model)
    lists: dict[str, object] = {}
    for name, least in model.long_lists.items():
        if name in fields and (shape := _shape(fields[name])) is not None:
            lists[name] = _read(fields[name], name, shape, tokens, least)
            fields[name] = _STUB if shape == "lists" else b"[0]"
    rest = b",".join(b'"%s":%s' % (name.encode(), bytes(raw)) for name, raw in fields.items())
    if values(rest, most) > most:
        raise ApiError(413, f"the body has more than {most} values besides token ids", code="body_too_large")
    return _validate(b"{%s}" % rest, model).model_copy(update=lists)


def values(raw: bytes | bytearray, most: int, size: int = _SLICE) -> int:
    """How many values the JSON may have at most: commas and brackets outside strings. Ends early above
    `most`. Reads slices, between which other threads go on; what is no JSON gives some number."""
    found, place, inside = 1, 0, 0
    while place < len(raw) and found <= most:
        piece = bytes(raw[place : place + size])
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and place + len(piece) < len(raw):
            piece = piece[:-1]  # an escape stays with what it escapes
        place += len(piece)
        # Without escapes, every other part between quotes is outside strings.
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[inside::2])
        inside ^= (len(parts) - 1) % 2
        found += sum(map(outside.count, (b",", b"[", b"{")))
    return found


def _validate(raw: bytes | bytearray, model: type[Body]) -> Body:
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error) from None


@cache
def _envelope(model: type[Strict]) -> type[msgspec.Struct]:
    fields = [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in model.model_fields]
    return msgspec.defstruct("Envelope", fields, forbid_unknown_fields=True)


def _separate(raw: bytes | bytearray, model: type[Strict]) -> dict[str, bytes | msgspec.Raw]:
    """The JSON of each field, unread."""
    try:
        envelope = msgspec.json.decode(raw, type=_envelope(model))
    except msgspec.ValidationError as error:
        unknown = re.search("unknown field `(.*)`", str(error), re.DOTALL)
        if unknown is None:
            raise bad_request("body: input should be an object", code="invalid_value") from None
        name = unknown[1][:128]
        raise bad_request(f"{name}: unknown field", name, "unknown_field") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from None
    found = ((name, getattr(envelope, name)) for name in model.model_fields)
    return {name: value for name, value in found if value is not msgspec.UNSET}


def _shape(raw: bytes | msgspec.Raw) -> str | None:
    """Whether a field holds a list of numbers or of lists."""
    beginning = bytes(memoryview(raw)[:_SLICE]).split(None, 2)
    joined = b"".join(beginning[:2])
    if joined[:1] != b"[":
        return None
    if joined[1:2] == b"[":
        return "lists"
    return "numbers" if joined[1:2] in b"-0123456789" and joined[1:2] else None


def _read(raw: bytes | msgspec.Raw, field: str, shape: str, tokens: TokenNumbers, least: int) -> object:
    if shape == "numbers":
        return _read_list(raw, field, tokens, MAX_TOKEN_IDS)
    whole = memoryview(raw)
    if sum(piece.count(b"[") for piece in _slices(whole)) > MAX_PROMPTS + 1:
        raise bad_request(f"{field}: more than {MAX_PROMPTS} lists", field, "invalid_value")
    found: list[tuple[int, ...]] = []
    left = MAX_TOKEN_IDS
    for place, one in enumerate(_read_lists(whole)):
        found.append(_read_list(one, f"{field}.{place}", tokens, left))
        left -= len(found[-1])
        if len(found[-1]) < least:
            raise bad_request(f"{field}.{place}: no tokens", f"{field}.{place}", "invalid_value")
    return found


def _read_list(raw: bytes | msgspec.Raw, field: str, tokens: TokenNumbers, most: int) -> tuple[int, ...]:
    """One list of ids; what the model has no room for is not read at all."""
    whole = memoryview(raw)
    name = field.partition(".")[0]
    if bytes(whole[:1]) != b"[":
        raise bad_request(f"{field}: input should be a list of token ids", field, "invalid_value")
    count = 1 + sum(piece.count(b",") for piece in _slices(whole))
    if count > tokens.context:
        raise too_long(str(count), tokens.context, name)
    if count > most:
        raise bad_request(f"{name}: more than {MAX_TOKEN_IDS} token ids", name, "invalid_value")
    found: list[int] = []
    read: list[int] = []
    try:
        for piece in _cut(whole):
            read = _read_numbers(piece)
            found.extend(map(tokens.numbers.__getitem__, read))
    except msgspec.ValidationError as error:
        wrong = re.search(r"\$\[(\d+)\]", str(error))
        at = f"{field}.{len(found) + int(wrong[1] if wrong else 0)}"
        raise bad_request(f"{at}: input should be a token id", at, "invalid_value") from None
    except IndexError:
        message = f"{name}: token id {max(read)} is outside the vocabulary of {len(tokens.numbers)}"
        raise bad_request(message, name, "invalid_value") from None
    return tuple(found)


def _slices(whole: memoryview) -> Iterator[bytes]:
    for place in range(0, len(whole), _SLICE):
        yield bytes(whole[place : place + _SLICE])


def _cut(whole: memoryview) -> Iterator[bytes]:
    """Lists whose elements, one after the other, are those of the whole list."""
    place, size = 1, _SLICE
    while place < len(whole) - 1:
        piece = bytes(whole[place : min(place + size, len(whole) - 1)])
        last = place + len(piece) == len(whole) - 1
        comma = len(piece) if last else piece.rfind(b",")
        if comma < 0:
            size *= 2  # white space, or no list of ids
            continue
        yield b"[%s]" % piece[:comma]
        place, size = place + comma + 1, _SLICE
