"""Clients that never read their answers, and clients that read slower than tokens are generated.

Their receive buffers are small, so that unread data waits on the server's side.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import msgspec

from ssd_serve.base.errors import SsdError

_CLIENTS = 4
_SMALL_BUFFER = 4096
_SLOWLY_S = 0.5
"""Pause between two reads of a full buffer: much slower than tokens are generated."""
_SILENCE_S = 120.0
_ACCEPTED, _END = b"HTTP/1.1 200", b"data: [DONE]"


def never_read(url: str) -> Callable[[], dict[str, float]]:
    """Start some long answers and read nothing of them; call the result to disconnect."""
    clients = _ask_all(url)

    def disconnect() -> dict[str, float]:
        for client in clients:
            client.close()
        return {"clients": _CLIENTS}

    return disconnect


def read_slowly(url: str) -> Callable[[], dict[str, float]]:
    """Start some long answers and read them slowly; call the result to read the rest."""
    hurry = threading.Event()
    whole: list[bool] = []

    def read(client: socket.socket) -> None:
        end = b""
        with client, suppress(OSError):  # cut off: not whole
            while data := client.recv(_SMALL_BUFFER):
                end = (end + data)[-_SMALL_BUFFER:]
                if _END in end:
                    whole.append(True)
                    return
                hurry.wait(_SLOWLY_S)

    readers = [threading.Thread(target=read, args=(client,), daemon=True) for client in _ask_all(url)]
    for reader in readers:
        reader.start()

    def read_on() -> dict[str, float]:
        hurry.set()
        for reader in readers:
            reader.join(_SILENCE_S)
        return {"clients": _CLIENTS, "whole_answers": len(whole)}

    return read_on


def _ask_all(url: str) -> list[socket.socket]:
    """Connect all clients and wait for the beginning of each answer."""
    with ExitStack() as stack:
        clients = [stack.enter_context(_ask(url)) for _ in range(_CLIENTS)]
        stack.pop_all()
    return clients


def _ask(url: str) -> socket.socket:
    place = urlsplit(url)
    fields: dict[str, object] = {"prompt": "def f(", "max_tokens": 400, "ignore_eos": True, "logprobs": 5}
    body = msgspec.json.encode({**fields, "stream": True, "n": 2})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    client = socket.socket()
    client.settimeout(_SILENCE_S)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
    client.connect((place.hostname or "", place.port or 0))
    client.sendall(head.encode() + body)
    status = client.recv(len(_ACCEPTED), socket.MSG_PEEK)
    if status != _ACCEPTED:
        client.close()
        raise SsdError(f"a slow client was not served: {status!r}")
    return client
