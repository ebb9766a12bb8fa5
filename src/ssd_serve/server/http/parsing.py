"""Parses request bodies with bounded time and memory.

pydantic takes some hundred bytes for each value of a body and an error object for each invalid one, in one call
that holds the GIL. So the values of a long body are counted before anything is decoded. Lists of token ids may be
long: they are read in slices, as references to shared integers.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

import msgspec
from pydantic import ValidationError

from ssd_serve.sampling.validation import context_length_error, vocabulary_error
from ssd_serve.server.errors import ApiError, bad_request, from_ssd_error, from_validation
from ssd_serve.server.limits import MAX_PROMPTS, MAX_TEXT_BYTES, MAX_TOKEN_ID, MAX_TOKEN_IDS, MAX_VALUES
from ssd_serve.server.openai.fields import Strict

SLICE = 1 << 16

Body = TypeVar("Body", bound=Strict)
Raw = bytes | bytearray | msgspec.Raw

_read_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_read_lists = msgspec.json.Decoder(list[msgspec.Raw]).decode
_read_numbers = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]]).decode


@dataclass(frozen=True, slots=True)
class TokenNumbers:
    """Limits of token ids. `numbers` has all ids of the vocabulary; lists of ids hold references to them."""

    context: int
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, context: int, vocabulary: int) -> "TokenNumbers":
        """Return the limits of a model."""
        return cls(context, tuple(range(vocabulary)))


def parse(raw: bytes | bytearray, model: type[Body], tokens: TokenNumbers, short: int = SLICE) -> Body:
    """Return the validated body, or raise `ApiError`.

    A body of more than `short` bytes may have `MAX_VALUES` values besides token ids, and texts of
    `MAX_TEXT_BYTES`.
    """
    if len(raw) <= short:
        try:
            return model.model_validate_json(raw)
        except ValidationError as error:
            raise from_validation(error) from None
    if count(raw, (b":",), MAX_VALUES) > MAX_VALUES:
        raise _too_many_values()
    try:
        fields = _read_object(raw)
    except msgspec.ValidationError:
        raise bad_request("body: input should be an object", code="invalid_value") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _no_json(error) from None
    if "truncate_prompt_tokens" in fields:
        tokens = replace(tokens, context=MAX_TOKEN_IDS)  # a longer prompt is truncated
    lists: dict[str, object] = {}
    found: dict[str, object] = {}
    for name, least in model.long_lists.items():
        if name in fields and (shape := _shape(fields[name])) is not None:
            lists[name] = _read_ids(fields.pop(name), name, shape, tokens, least)
            found[name] = [[0]] if shape == "lists" else [0]
    found.update(_decode(fields))
    try:
        return model.model_validate(found).model_copy(update=lists)
    except ValidationError as error:
        raise from_validation(error) from None


def _decode(fields: dict[str, msgspec.Raw]) -> dict[str, object]:
    left = MAX_VALUES
    for part in fields.values():
        left -= 1 + count(part, (b",", b"[", b"{"), left)
        if left < 0:
            raise _too_many_values()
    try:
        found: dict[str, object] = {name: msgspec.json.decode(part) for name, part in fields.items()}
        size = _text_bytes(found)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _no_json(error) from None
    if size > MAX_TEXT_BYTES:
        message = (
            f"the texts of the body take more than {MAX_TEXT_BYTES} bytes; where a text has characters "
            "beyond U+00FF each of its characters takes two, with an emoji four"
        )
        raise ApiError(413, message, code="body_too_large")
    return found


def _text_bytes(value: object) -> int:
    """Return the memory of all strings in the value, except names of fields."""
    if isinstance(value, str):
        widest = "" if value.isascii() else max(value)
        return len(value) * (1 if widest <= "\xff" else 2 if widest <= "\uffff" else 4)
    if isinstance(value, list):
        return sum(map(_text_bytes, value))
    return sum(map(_text_bytes, value.values())) if isinstance(value, dict) else 0


def count(raw: Raw, what: tuple[bytes, ...], most: int, size: int = SLICE) -> int:
    """Count these bytes outside strings. Stops above `most`; the count of invalid JSON is arbitrary."""
    whole, place, found, inside = memoryview(raw), 0, 0, 0
    while place < len(whole) and found <= most:
        piece = bytes(whole[place : place + size])
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and place + len(piece) < len(whole):
            piece = piece[:-1]  # an escape stays with what it escapes
        place += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        found += sum(map(b"".join(parts[inside::2]).count, what))
        inside ^= (len(parts) - 1) % 2
    return found


def _too_many_values() -> ApiError:
    message = f"the body has more than {MAX_VALUES} values besides token ids"
    return ApiError(413, message, code="body_too_large")


def _no_json(error: Exception) -> ApiError:
    return bad_request(f"the body is not JSON: {error}", code="invalid_json")


def _slices(whole: memoryview) -> Iterator[bytes]:
    for place in range(0, len(whole), SLICE):
        yield bytes(whole[place : place + SLICE])


def _shape(raw: Raw) -> str | None:
    """Return `numbers` or `lists` for a list of these, else None."""
    beginning = bytes(memoryview(raw)[:SLICE]).split(None, 2)
    joined = b"".join(beginning[:2])
    if joined[:1] != b"[":
        return None
    if joined[1:2] == b"[":
        return "lists"
    return "numbers" if joined[1:2] in b"-0123456789" and joined[1:2] else None


def _read_ids(raw: Raw, field: str, shape: str, tokens: TokenNumbers, least: int) -> object:
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


def _read_list(raw: Raw, field: str, tokens: TokenNumbers, most: int) -> tuple[int, ...]:
    """Read a list of ids. A list longer than the context is refused before it is read."""
    whole = memoryview(raw)
    name = field.partition(".")[0]
    if bytes(whole[:1]) != b"[":
        raise bad_request(f"{field}: input should be a list of token ids", field, "invalid_value")
    size = 1 + sum(piece.count(b",") for piece in _slices(whole))
    if size > tokens.context:
        raise from_ssd_error(context_length_error(str(size), tokens.context, name))
    if size > most:
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
        raise from_ssd_error(vocabulary_error(max(read), len(tokens.numbers), name)) from None
    return tuple(found)


def _cut(whole: memoryview) -> Iterator[bytes]:
    """Cut a JSON list into shorter JSON lists with the same elements."""
    place, size = 1, SLICE
    while place < len(whole) - 1:
        piece = bytes(whole[place : min(place + size, len(whole) - 1)])
        last = place + len(piece) == len(whole) - 1
        comma = len(piece) if last else piece.rfind(b",")
        if comma < 0:
            size *= 2  # white space, or no list of ids
            continue
        yield b"[%s]" % piece[:comma]
        place, size = place + comma + 1, SLICE
