"""Bodies that cost much: those that the hostile tests send, and valid ones that have much done for them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.hostile.test_bodies import CHAT, COMPLETIONS, NO_JSON, TEXTS, WRONG_FIELDS, WRONG_IDS, filled


@dataclass(frozen=True, slots=True)
class BodyKind:
    """One body for one path."""

    name: str
    path: str
    body: bytes


def all_kinds(token: int) -> Iterator[BodyKind]:
    """Every kind; `token` is one whose text is long enough for the stop strings."""
    for group in (WRONG_IDS, WRONG_FIELDS, NO_JSON, TEXTS):
        for name, (path, body) in group.items():
            yield BodyKind(name, path, body)
    for name, body in _json_of(_valid(token)).items():
        yield BodyKind(name, CHAT if "messages" in name else COMPLETIONS, body)
    yield BodyKind("120,000 ids", COMPLETIONS, b'{"prompt":[' + b"1234," * 120_000 + b'1],"max_tokens":4}')
    lists = b"[" + b"1234," * 8190 + b"1]"
    yield BodyKind(
        "120 lists of 8,191 ids",
        COMPLETIONS,
        b'{"prompt":[' + b",".join([lists] * 120) + b'],"max_tokens":2}',
    )
    scored = b'{"echo":true,"logprobs":1,"max_tokens":1,"prompt":['
    yield BodyKind("120,000 ids, echoed and scored", COMPLETIONS, scored + b"1234," * 120_000 + b"1]}")
    yield BodyKind("130,000 ids to detokenise", "/detokenize", b'{"tokens":[' + b"1234," * 130_000 + b"1]}")
    yield BodyKind("white space", COMPLETIONS, b'{"prompt":' + filled(b" ") + b'"a","max_tokens":2}')
    yield BodyKind("one name of 8 MiB", COMPLETIONS, b'{"' + filled(b"a") + b'":1}')
    yield BodyKind("words of 480,000 characters to tokenise", "/tokenize", _words(60_000))


def _words(count: int) -> bytes:
    return b'{"prompt":"' + b"abc def " * count + b'","return_token_strs":true}'


def _json_of(bodies: Mapping[str, object]) -> dict[str, bytes]:
    return {name: json.dumps(body).encode() for name, body in bodies.items()}


def _valid(token: int) -> dict[str, object]:
    biases = {str(place): 1 for place in range(2048)}
    return {
        "2,048 biases, 100 prompts": {"prompt": ["a"] * 100, "max_tokens": 1, "logit_bias": biases},
        "128 texts of 32 kB": {"prompt": ["hello world " * 2700] * 128, "max_tokens": 1},
        "120 texts of 4 kB": {"prompt": ["hello you " * 409] * 120, "max_tokens": 1},
        "128 bad words": {
            "prompt": "a",
            "max_tokens": 1,
            "bad_words": [f"{place:03}" + "ab " * 84 for place in range(128)],
        },
        "120 answers of 2,000 tokens that go on, worst stop strings": {
            "prompt": "a",
            "n": 120,
            "seed": 1,
            "max_tokens": 2100,
            "stop": ["a" * (511 - place) + "b" for place in range(16)],
            "generated_token_ids": [[token] * 2000] * 120,
        },
        "120 answers of 400 tokens, 20 log-probabilities": {
            "prompt": "a",
            "n": 120,
            "max_tokens": 400,
            "logprobs": 20,
        },
        "4,096 messages without words": {
            "max_tokens": 2,
            "messages": [{"role": "user", "content": ""}] * 4096,
        },
    }
