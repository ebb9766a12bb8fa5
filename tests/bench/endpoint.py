"""An OpenAI endpoint with known delays: uvicorn in this process, without code of `ssd serve`."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import uvicorn

from tests.servers import free_port

Event: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Event]]
Send: TypeAlias = Callable[[Event], Awaitable[None]]


@dataclass(slots=True)
class Endpoint:
    """Endpoint that answers after `first_s`, then sends `per_chunk` tokens every `gap_s`.

    Without `usage` an answer does not report its number of tokens. `short` is the maximum length of answers.
    Seeds in `refuse` get a 500. With `rounds` a metrics page counts speculation; `positions` holds
    accepted tokens per round by position.
    """

    first_s: float = 0.06
    gap_s: float = 0.02
    per_chunk: int = 1
    usage: bool = True
    line_end: str = "\n"
    short: int | None = None
    refuse: frozenset[int] = frozenset()
    rounds: int = 0
    prefix: str = "vllm:"
    positions: dict[int, float] = field(default_factory=dict[int, float])
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    paths: list[str] = field(default_factory=list[str])
    arrived_s: list[float] = field(default_factory=list[float])

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] != "http":
            return
        if scope["path"] == "/v1/models":
            await _answer(send, 200, json.dumps({"data": [{"id": "model-of-truth"}]}).encode())
        elif scope["path"] == "/metrics" and self.rounds:
            counters = {
                "drafts": self.rounds,
                "draft_tokens": 4 * self.rounds,
                "accepted_tokens": self.rounds,
            }
            page = [f"{self.prefix}spec_decode_num_{name}_total {value}" for name, value in counters.items()]
            page += [
                f'{self.prefix}spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}} {value}'
                for place, share in self.positions.items()
                for value in [share * self.rounds]
            ]
            await _answer(send, 200, "\n".join(page).encode())
            self.rounds += 10
        elif scope["method"] != "POST":
            await _answer(send, 404, b"{}")
        else:
            self.arrived_s.append(time.perf_counter())
            body = json.loads((await receive())["body"])
            self.bodies.append(body)
            self.paths.append(scope["path"])
            if body["seed"] in self.refuse:
                await _answer(send, 500, b'{"error": {"message": "as ordered"}}')
            else:
                await self._stream(body, scope["path"].endswith("chat/completions"), send)

    async def _stream(self, body: dict[str, Any], chat: bool, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in self._events(body, chat):
            data = f"data: {event}{self.line_end}{self.line_end}".encode()
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _events(self, body: dict[str, Any], chat: bool) -> AsyncIterator[str]:
        wanted = body["max_completion_tokens" if chat else "max_tokens"]
        tokens, sent = min(wanted, self.short or wanted), 0
        begun = time.perf_counter()
        if chat:
            yield json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for number in range((tokens + self.per_chunk - 1) // self.per_chunk):
            due = begun + self.first_s + number * self.gap_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            sent = min(tokens, sent + self.per_chunk)
            yield json.dumps({"choices": [{"delta": {"content": "x"}} if chat else {"text": "x"}]})
        if self.usage:
            yield json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": sent}})
        yield "[DONE]"


async def _answer(send: Send, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def listening(endpoint: Endpoint) -> Generator[tuple[Endpoint, str]]:
    """Serve the endpoint at a free port; yield it with its address."""
    port = free_port()
    config = uvicorn.Config(endpoint, host="127.0.0.1", port=port, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield endpoint, f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
