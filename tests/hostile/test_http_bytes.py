"""Invalid and ambiguous HTTP, and clients that disconnect at any time."""

import contextlib
import gzip
import socket
import struct

import pytest

from tests.hostile.target_server import TargetServer

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "def f(", "max_tokens": 4}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)

REFUSED: dict[str, bytes] = {
    "no HTTP at all": b"\x00\xff\x13\x37" * 64 + b"\r\n\r\n",
    "a TLS hello": bytes.fromhex("1603010200010001fc0303") + b"\x11" * 512,
    "HTTP/2 at once": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 9,
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/9.9": b"GET /health HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
    "a head without an end": b"GET /health HTTP/1.1\r\nX: " + b"a" * (1 << 20),
    "ten thousand headers": b"GET /health HTTP/1.1\r\n" + b"X-A: b\r\n" * 10_000 + b"\r\n",
    "a path of a megabyte": b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a line feed in a header": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: a\x00b\r\n\r\n",
    "a header without a name": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n: a\r\n\r\n",
    "a space before the colon": b"GET /health HTTP/1.1\r\nHost : 127.0.0.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: example.org\r\n\r\n",
    "two lengths": HEAD + LENGTH + b"Content-Length: 3\r\n\r\n" + BODY,
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
    "a length of words": HEAD + b"Content-Length: many\r\n\r\n" + BODY,
    "a length of a hundred digits": HEAD + b"Content-Length: " + b"9" * 100 + b"\r\n\r\n" + BODY,
    "a length beyond the limit": HEAD + b"Content-Length: 99999999999\r\n\r\n" + BODY,
    "an unknown transfer coding": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a chunk of no number": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk of minus one": HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a packed body": HEAD
    + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(gzip.compress(BODY))
    + gzip.compress(BODY),
    "another media type": HEAD.replace(b"application/json", b"text/plain") + LENGTH + b"\r\n" + BODY,
    "a body in UTF-16": HEAD
    + b"Content-Length: %d\r\n\r\n" % (2 * len(BODY))
    + BODY.decode().encode("utf-16le"),
    "a tunnel": b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: 127.0.0.1:22\r\n\r\n",
    "a method of no RFC": b"FROBNICATE /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a way out of the root": b"GET /../../etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "an encoded way out": b"GET /v1/models/%2e%2e%2f%2e%2e%2fetc%2fhosts HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
}


def answer(attacker: socket.socket) -> bytes:
    """Read until the server closes the connection or sends nothing for 1.5 s."""
    attacker.settimeout(1.5)
    parts = b""
    with contextlib.suppress(OSError):
        while part := attacker.recv(65536):
            parts += part
    return parts


def test_invalid_request_is_refused(server: TargetServer) -> None:
    with server.unharmed():
        for name, request in REFUSED.items():
            with server.connect() as attacker:
                with contextlib.suppress(OSError):  # the server may close before all is sent
                    attacker.sendall(request)
                received = answer(attacker)
            status = received.partition(b"\r\n")[0]
            assert status == b"" or status.startswith(b"HTTP/1.1 4"), (name, received[:300])
            assert b"root:" not in received, name


@pytest.mark.parametrize("chunks_first", [False, True])
def test_request_smuggling_with_two_lengths_is_refused(server: TargetServer, chunks_first: bool) -> None:
    hidden = b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    lengths = [b"Content-Length: %d\r\n" % (5 + len(hidden)), b"Transfer-Encoding: chunked\r\n"]
    if chunks_first:
        lengths.reverse()
    with server.unharmed(), server.connect() as attacker:
        attacker.sendall(HEAD + b"".join(lengths) + b"\r\n0\r\n\r\n" + hidden)
        received = answer(attacker)
    assert received.startswith(b"HTTP/1.1 400")
    assert b'"version"' not in received


def test_pipelined_requests_are_answered(server: TargetServer) -> None:
    with server.unharmed(), server.connect() as attacker:
        attacker.sendall(b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 100)
        received = answer(attacker)
    assert received.count(b"HTTP/1.1 200") == 100


def test_endless_chunks_are_refused_at_the_body_limit(server: TargetServer) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with server.unharmed() as harm, server.connect() as attacker:
        attacker.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(OSError):
            for _ in range(1024):  # 64 MiB
                attacker.sendall(chunk)
        received = answer(attacker)
    assert received == b"" or b"413" in received.partition(b"\r\n")[0]
    assert harm.peak_mb < 48


def test_immediate_disconnects_leak_nothing(server: TargetServer) -> None:
    stream = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    reset = struct.pack("ii", 1, 0)
    with server.unharmed():
        for index in range(300):
            attacker = server.connect()
            if index % 3:
                attacker.sendall(stream if index % 3 == 1 else stream[:40])
            attacker.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            attacker.close()
