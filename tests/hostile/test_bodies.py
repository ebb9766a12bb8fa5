"""Tests of expensive request bodies up to the size limit, during a stream of another client."""

import contextlib
import json
import socket
import struct
import time
from collections.abc import Mapping

import pytest

from tests.hostile.target_server import FIRST_WRITES_MB, KEPT_MB, TargetServer

LIMIT = 8 * 2**20
BODY_BYTES = LIMIT - 300
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ONE_BODY_MB = 96.0
"""Ten times the body's size with one wide character: the body, its text at four bytes a character, and the
decoder's buffers; the rest for the other client."""


def filled(unit: bytes) -> bytes:
    """Repeat the unit up to the body limit."""
    return unit * (BODY_BYTES // len(unit))


def numbered(pattern: bytes, count: int) -> bytes:
    return b",".join(pattern % number for number in range(count))


WRONG_IDS: Mapping[str, tuple[str, bytes]] = {
    "negative ids": (COMPLETIONS, b'{"prompt": [' + filled(b"-1,") + b"1]}"),
    "ids beyond the context": (COMPLETIONS, b'{"prompt": [' + filled(b"12,") + b"1]}"),
    "ids to detokenise": ("/detokenize", b'{"tokens": [' + filled(b"12,") + b"1]}"),
    "a list for every choice there could be": (COMPLETIONS, b'{"prompt": [' + filled(b"[1],") + b"[1]]}"),
    "empty lists": (COMPLETIONS, b'{"prompt": [' + filled(b"[],") + b"[1]]}"),
    "ids of answers": (COMPLETIONS, b'{"prompt": "a", "generated_token_ids": [[' + filled(b"-1,") + b"1]]}"),
    "one id of millions of digits": (COMPLETIONS, b'{"prompt": [' + filled(b"1") + b"]}"),
    "ids that are no numbers": (COMPLETIONS, b'{"prompt": [' + filled(b"NaN,") + b"1]}"),
}
WRONG_FIELDS: Mapping[str, tuple[str, bytes]] = {
    "unknown fields": (CHAT, b"{" + numbered(b'"a%d":0', 600_000) + b"}"),
    "some thousand unknown fields": (CHAT, b"{" + numbered(b'"a%d":0', 32_000) + b"}"),
    "unknown fields of one message": (CHAT, b'{"messages": [{' + numbered(b'"a%d":0', 30_000) + b"}]}"),
    "one field again and again": (COMPLETIONS, b"{" + filled(b'"prompt":1,') + b'"prompt":1}'),
    "labels of lists": (COMPLETIONS, b'{"prompt": "a", "metadata": [' + filled(b"[],") + b"1]}"),
    "labels of objects": (COMPLETIONS, b'{"prompt": "a", "metadata": [' + filled(b'{"a":0},') + b"1]}"),
    "biases": (COMPLETIONS, b'{"prompt": "a", "logit_bias": {' + numbered(b'"%d":1', 500_000) + b"}}"),
    "wrong biases": (COMPLETIONS, b'{"prompt": "a", "logit_bias": {' + numbered(b'"x%d":1', 16_000) + b"}}"),
    "empty messages": (CHAT, b'{"messages": [' + filled(b'{"role":"user","content":""},') + b"1]}"),
    "stop strings": (COMPLETIONS, b'{"prompt": "a", "stop": [' + filled(b'"",') + b'""]}'),
}
NO_JSON: Mapping[str, tuple[str, bytes]] = {
    "brackets": (COMPLETIONS, b'{"prompt": ' + filled(b"[")),
    "objects in objects": (COMPLETIONS, b'{"metadata": ' + filled(b'{"a":')),
    "quotes": (COMPLETIONS, filled(b'"')),
    "bytes that are no text": (COMPLETIONS, b'{"prompt": "' + filled(b"\xff") + b'"}'),
    "halves of characters": (COMPLETIONS, b'{"prompt": "' + filled(b"\\ud83d") + b'"}'),
}
TEXTS: Mapping[str, tuple[str, bytes]] = {
    "words": (COMPLETIONS, b'{"prompt": "' + filled(b"a b, c ") + b'"}'),
    "spaces": (COMPLETIONS, b'{"prompt": "' + filled(b" ") + b'"}'),
    "escapes": (COMPLETIONS, b'{"prompt": "' + filled(b"\\u00e9") + b'"}'),
    "backslashes": (COMPLETIONS, b'{"prompt": "' + filled(b"\\\\") + b'"}'),
    "one wide character": (COMPLETIONS, b'{"prompt": "' + filled(b"a") + b'\\ud83d\\ude00"}'),
    "a long message": (CHAT, b'{"messages": [{"role": "user", "content": "' + filled(b"a b ") + b'"}]}'),
    "words to tokenise": (
        "/tokenize",
        b'{"prompt": "' + filled(b"a b, c ") + b'", "return_token_strs": true}',
    ),
}


@pytest.mark.parametrize("kinds", [WRONG_IDS, WRONG_FIELDS, NO_JSON], ids=["ids", "fields", "no JSON"])
def test_long_invalid_body_is_refused_within_bounds(
    server: TargetServer, kinds: Mapping[str, tuple[str, bytes]]
) -> None:
    with server.unharmed() as harm:
        for name, (path, body) in kinds.items():
            answer = server.post(path, body)
            assert answer.status_code in (400, 413), (name, answer.text)
            assert len(answer.content) < 2_000, name
    assert harm.peak_mb < ONE_BODY_MB


def test_long_text_above_the_context_is_refused_within_bounds(server: TargetServer) -> None:
    with server.unharmed() as harm:
        for name, (path, body) in TEXTS.items():
            answer = server.post(path, body)
            assert answer.status_code in (400, 413), (name, answer.text)
            assert answer.json()["error"]["code"] in {"context_length_exceeded", "body_too_large"}, name
    assert harm.peak_mb < ONE_BODY_MB


EXPENSIVE: Mapping[str, Mapping[str, object]] = {
    "logit biases": {"logit_bias": {str(token): 0.5 for token in range(1000)}},
    "allowed tokens": {"allowed_token_ids": list(range(1000))},
    "bad words": {"bad_words": ["a" * (1 + word) for word in range(128)]},
    "log-probabilities": {"logprobs": 20},
}


def test_many_expensive_choices_do_not_delay_other_clients(server: TargetServer) -> None:
    body = {"prompt": "import os\n\n\ndef walk(path):\n", "n": 32, "max_tokens": 24, "ignore_eos": True}
    with server.unharmed(kept_mb=FIRST_WRITES_MB):
        for name, options in EXPENSIVE.items():
            answer = server.post(COMPLETIONS, {**body, **options})
            assert answer.status_code == 200, (name, answer.text)
            assert len(answer.json()["choices"]) == 32


def test_worst_case_stop_strings_do_not_delay_other_clients(server: TargetServer) -> None:
    """The generated tokens already end with a stop string, so that only the front end works."""
    many, last = (only_token(server, text) for text in ("aaaaaaaa", "b"))
    body = {
        "prompt": "a",
        "n": 100,
        "seed": 1,
        "max_tokens": 1902,
        "stop": ["a" * (511 - place) + "b" for place in range(16)],
        "generated_token_ids": [[many] * 1900 + [last]] * 100,
    }
    with server.unharmed():
        answer = server.post(COMPLETIONS, body)
    assert answer.status_code == 200
    assert {choice["finish_reason"] for choice in answer.json()["choices"]} == {"stop"}


def only_token(server: TargetServer, text: str) -> int:
    asked = {"prompt": text, "add_special_tokens": False}
    (token,) = server.post("/tokenize", asked).json()["tokens"]
    return int(token)


def test_work_of_disconnected_clients_is_cancelled(server: TargetServer) -> None:
    body = {
        "prompt": "a",
        "n": 128,
        "seed": 1,
        "max_tokens": 2000,
        "generated_token_ids": [[100] * 1990] * 128,
    }
    with server.unharmed():
        for _ in range(12):
            send_and_reset(server, COMPLETIONS, json.dumps(body).encode())
            send_and_reset(server, "/tokenize", TEXTS["words to tokenise"][1])
        began = time.monotonic()
        assert server.post(COMPLETIONS, {"prompt": "a " * 1000, "max_tokens": 1}).status_code == 200
        assert time.monotonic() - began < 20.0


def head(path: str, framing: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", framing, "", ""]
    return "\r\n".join(lines).encode()


def send_and_reset(server: TargetServer, path: str, body: bytes) -> None:
    with server.connect() as attacker:
        attacker.sendall(head(path, f"Content-Length: {len(body)}") + body)
        attacker.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_body_in_chunks_of_one_byte(server: TargetServer) -> None:
    chunks = b"1\r\n \r\n" * 200_000 + b"0\r\n\r\n"
    with server.unharmed(), server.connect(120.0) as attacker:
        with contextlib.suppress(OSError):
            attacker.sendall(head(COMPLETIONS, "Transfer-Encoding: chunked") + chunks)
        assert attacker.recv(12) == b"HTTP/1.1 400"


def test_unfinished_bodies_release_memory_for_others(server: TargetServer) -> None:
    """Together they announce twice the limit of all bodies, and each stops before its last byte."""
    with server.unharmed() as harm, contextlib.ExitStack() as stack:
        for _ in range(16):
            attacker = stack.enter_context(server.connect())
            attacker.settimeout(0.5)
            with contextlib.suppress(OSError):  # the server stops reading
                attacker.sendall(head(COMPLETIONS, f"Content-Length: {LIMIT}") + filled(b" "))
        began = time.monotonic()
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status_code == 200
        assert time.monotonic() - began < 20.0
        long = {"prompt": [1] * 40_000, "max_tokens": 1}
        assert server.post(COMPLETIONS, long).status_code == 400
        assert time.monotonic() - began < 30.0
    assert harm.peak_mb < 200.0


def test_unread_stream_is_ended_before_it_fills_memory(server: TargetServer) -> None:
    body = {"prompt": "a", "n": 16, "max_tokens": 1500, "logprobs": 20, "stream": True, "ignore_eos": True}
    content = json.dumps(body).encode()
    for kept_mb in (FIRST_WRITES_MB, KEPT_MB):
        with server.unharmed(kept_mb=kept_mb) as harm, server.connect(receive_buffer=4096) as attacker:
            attacker.sendall(head(COMPLETIONS, f"Content-Length: {len(content)}") + content)
            time.sleep(10.0)
        assert harm.peak_mb < 150.0
