"""Long bodies are read as pydantic reads them, and those with too many values are refused before decoding."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ssd_serve.server.errors import ApiError
from ssd_serve.server.http.parsing import TokenNumbers, count, parse
from ssd_serve.server.limits import MAX_MESSAGES
from ssd_serve.server.openai.fields import Strict
from ssd_serve.server.openai.protocol import ChatRequest, CompletionRequest, DetokenizeRequest

TOKENS = TokenNumbers.of(context=100_000, vocabulary=1000)
SHORT = 24
"""Bodies of more bytes count as long in these tests."""

IDS = st.lists(st.integers(0, 999), max_size=8)
TEXT = st.text(alphabet='ab",[]{}\\\né🙂', max_size=8)
PROMPTS = TEXT | st.lists(TEXT, max_size=3) | IDS | st.lists(IDS, max_size=4)
WRONG = st.sampled_from([[1, "a"], [[1], 2], [[1], [True]], [-1], [[1], [-1]], [1.5], [None], {}, 7, [[[1]]]])
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "prompt": PROMPTS | WRONG,
        "generated_token_ids": st.lists(IDS, max_size=4) | WRONG,
        "seed": st.integers(-3, 3),
        "unknown": st.none(),
    },
)
LONG_TEXT = st.text(alphabet='ab",[]{}\\\né🙂\u20ac:', max_size=60)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "nobody"])},
    optional={
        "content": LONG_TEXT
        | st.lists(st.fixed_dictionaries({"type": st.just("text")}, optional={"text": LONG_TEXT}), max_size=3)
        | st.none(),
        "name": LONG_TEXT,
    },
)
CONVERSATIONS = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGES, max_size=3)},
    optional={
        "temperature": st.sampled_from([0, 1, 0.5, -1, "1", True]),
        "seed": st.sampled_from([1, 1.0, 2**64, True]),
        "logit_bias": st.dictionaries(st.sampled_from(["1", "02", " 3", "4.0", "x"]), st.integers(-101, 101)),
        "stop": LONG_TEXT | st.lists(LONG_TEXT, max_size=3),
        "metadata": st.dictionaries(st.text('a:"€🙂', max_size=4), LONG_TEXT, max_size=2),
        "allowed_token_ids": IDS,
        "tools": st.sampled_from([[], [{}], None]),
        "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.sampled_from([True, 1])}),
    },
)
INDENTS = st.sampled_from([None, 0, 3])


def parsed(body: bytes, model: type[Strict], short: int) -> Strict | int:
    try:
        return parse(body, model, TOKENS, short=short)
    except ApiError as error:
        return error.status


@given(BODIES, INDENTS)
@example({"prompt": [[1], []]}, None)
@example({"prompt": []}, None)
@example({"prompt": [1, 2, 3, 4], "seed": 1}, 3)
def test_long_body_parsing_equals_pydantic(body: dict[str, Any], indent: int | None) -> None:
    raw = json.dumps(body, indent=indent).encode()
    assert parsed(raw, CompletionRequest, SHORT) == parsed(raw, CompletionRequest, 2**30)


@given(CONVERSATIONS, INDENTS, st.booleans())
def test_long_body_parsing_of_conversations_equals_pydantic(
    body: dict[str, Any], indent: int | None, plain: bool
) -> None:
    raw = json.dumps(body, indent=indent, ensure_ascii=plain).encode()
    assert parsed(raw, ChatRequest, SHORT) == parsed(raw, ChatRequest, 2**30)


@given(st.lists(st.lists(st.integers(0, 999), max_size=20), min_size=1, max_size=20), TEXT)
def test_token_lists_beside_other_fields_are_read_completely(lists: list[list[int]], text: str) -> None:
    raw = json.dumps({"prompt": text, "seed": 3, "generated_token_ids": lists}).encode()
    found = parse(raw, CompletionRequest, TOKENS, short=SHORT)
    assert (found.prompt, found.seed) == (text, 3)
    assert found.generated_token_ids == [tuple(ids) for ids in lists]


SEPARATORS = (b",", b"[", b"{")


def naive_values(raw: bytes) -> int:
    found, inside, escaped = 0, False, False
    for byte in raw:
        character = chr(byte)
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == '"':
            inside = not inside
        elif not inside and character in ",[{":
            found += 1
    return found


@given(st.recursive(TEXT | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner)))
@example('\\"' * 9)
@example(["\\" * 8, '"', "\\"])
def test_count_ignores_strings(value: object) -> None:
    raw = json.dumps(value, ensure_ascii=False).encode()
    for size in (3, 4, 5, 1000):
        assert count(raw, SEPARATORS, 10**9, size) == naive_values(raw)


def test_count_stops_above_its_limit() -> None:
    assert 100 < count(b"[]," * 10**6, SEPARATORS, 100) < 70_000


def test_invalid_token_id_is_named_by_index() -> None:
    ids = list(range(1000)) * 80
    assert parse(json.dumps({"tokens": ids}).encode(), DetokenizeRequest, TOKENS).tokens == tuple(ids)
    ids[60_123] = -1
    with pytest.raises(ApiError) as wrong:
        parse(json.dumps({"tokens": ids}).encode(), DetokenizeRequest, TOKENS)
    assert wrong.value.param == "tokens.60123"


def test_token_ids_are_shared_objects() -> None:
    found = parse(json.dumps({"tokens": [999] * 40_000}).encode(), DetokenizeRequest, TOKENS).tokens
    assert {id(token) for token in found} == {id(TOKENS.numbers[999])}


HUGE = 3_000_000
TOO_MUCH: dict[str, tuple[type[Strict], int, bytes]] = {
    "more ids than the context": (CompletionRequest, 400, b'{"prompt": [' + b"1," * HUGE + b"1]}"),
    "more ids than one body may have": (
        CompletionRequest,
        400,
        b'{"prompt": [' + b",".join([b"[" + b"1," * 90_000 + b"1]"] * 30) + b"]}",
    ),
    "an id beyond the vocabulary": (CompletionRequest, 400, b'{"prompt": [' + b"1," * 40_000 + b"1000]}"),
    "very many lists": (CompletionRequest, 400, b'{"prompt": [' + b"[]," * HUGE + b"[1]]}"),
    "nesting without end": (CompletionRequest, 400, b'{"prompt": ' + b"[" * HUGE),
    "nested objects without end": (CompletionRequest, 413, b'{"metadata": ' + b'{"a":' * HUGE),
    "a number of a million digits": (CompletionRequest, 400, b'{"seed": ' + b"1" * HUGE + b"}"),
    "a long number among ids": (DetokenizeRequest, 400, b'{"tokens": [1,' + b"1" * HUGE + b"]}"),
    "not a number": (DetokenizeRequest, 400, b'{"tokens": [' + b"NaN," * HUGE + b"1]}"),
    "labels of many values": (ChatRequest, 413, b'{"metadata": [' + b"[]," * HUGE + b"1]}"),
    "unknown fields": (ChatRequest, 413, b"{" + b",".join(b'"a%d":0' % n for n in range(40_000)) + b"}"),
    "one field many times": (ChatRequest, 413, b"{" + b'"seed":1,' * 100_000 + b'"seed":1}'),
    "a very long name": (ChatRequest, 400, b'{"' + b"a" * HUGE + b'" :1}'),
    "a very long nested name": (ChatRequest, 400, b'{"metadata":{"' + b"a" * HUGE + b'"\n:1}}'),
    "a very long text": (CompletionRequest, 413, b'{"prompt":"' + b"a" * 5_000_000 + '🙂"}'.encode()),
    "many long texts": (
        CompletionRequest,
        413,
        b'{"prompt":[' + b",".join([b'"' + b"a" * 60_000 + '🙂"'.encode()] * 80) + b"]}",
    ),
    "lists in lists": (
        ChatRequest,
        400,
        b'{"tools":' + b"[" * 20 + b'"' + b"a" * HUGE + b'"' + b"]" * 20 + b"}",
    ),
    "very many messages": (ChatRequest, 413, b'{"messages": [' + b"{}," * HUGE + b"{}]}"),
    "invalid UTF-8": (CompletionRequest, 400, b'{"prompt": "' + b"\xff" * HUGE + b'"}'),
    "lone surrogates": (CompletionRequest, 400, b'{"prompt": "' + b"\\ud83d" * 500_000 + b'"}'),
    "quotes": (CompletionRequest, 400, b'"' * HUGE),
}


@pytest.mark.parametrize("case", TOO_MUCH)
def test_body_above_any_limit_is_refused(case: str) -> None:
    model, status, raw = TOO_MUCH[case]
    with pytest.raises(ApiError) as refused:
        parse(bytearray(raw), model, TOKENS)
    assert refused.value.status == status
    assert len(refused.value.message) < 1000


def test_most_messages_are_below_the_value_limit() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "b"}
    body = json.dumps({"messages": [message] * MAX_MESSAGES}).encode()
    assert len(parse(body, ChatRequest, TOKENS).messages) == MAX_MESSAGES


def test_commas_in_strings_do_not_count() -> None:
    text = ',[{"' * 100_000
    assert parse(json.dumps({"prompt": text}).encode(), CompletionRequest, TOKENS).prompt == text


def test_many_invalid_fields_are_counted() -> None:
    biases = b",".join(b'"a%d":0' % place for place in range(2_000))
    with pytest.raises(ApiError) as wrong:
        parse(b'{"logit_bias":{' + biases + b"}}", ChatRequest, TOKENS)
    assert wrong.value.message.startswith("2001 fields or values are invalid")
