"""A completions API without a server: streams token ids in chunks and counts running requests."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx


class FakeApi:
    """Answers `/v1/completions`. `chunks` are the tokens of each chunk, repeated until all were sent."""

    def __init__(self, chunks: tuple[int, ...] = (1, 3), pause_s: float = 0.0, status: int = 200) -> None:
        self.chunks = chunks
        self.pause_s = pause_s
        self.status = status
        self.cut_after: int | None = None
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []
        self.running = 0
        self.max_running = 0

    @property
    def transport(self) -> httpx.MockTransport:
        """Transport for a client."""
        return httpx.MockTransport(self._answer)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/completions"
        body: dict[str, Any] = json.loads(await request.aread())
        self.bodies.append(body)
        self.headers.append(request.headers)
        if self.status != 200:
            return httpx.Response(self.status, json={"error": {"message": "too many requests are waiting"}})
        return httpx.Response(200, stream=_Stream(self, int(body["max_tokens"])))


class _Stream(httpx.AsyncByteStream):
    def __init__(self, api: FakeApi, tokens: int) -> None:
        self._api = api
        self._tokens = tokens

    async def __aiter__(self) -> AsyncIterator[bytes]:
        api, sent, turn = self._api, 0, 0
        api.running += 1
        api.max_running = max(api.max_running, api.running)
        try:
            yield event({"choices": [{"text": "", "prompt_token_ids": [1, 2]}], "seed": 5})
            while sent < self._tokens:
                await asyncio.sleep(api.pause_s)
                if api.cut_after is not None and sent >= api.cut_after:
                    return
                count = min(api.chunks[turn % len(api.chunks)], self._tokens - sent)
                sent, turn = sent + count, turn + 1
                last = {"metrics": figures(turn - 1, sent)} if sent == self._tokens else {}
                # In two reads: a chunk need not come in one piece.
                data = event({"choices": [{"text": "x", "token_ids": [7] * count}], **last})
                yield data[:9]
                yield data[9:]
            yield b"data: [DONE]\n\n"
        finally:
            api.running -= 1


def event(value: dict[str, object]) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def figures(rounds: int, tokens: int) -> dict[str, object]:
    """Return a response's speculation metrics; the first token is the prefill's, one a round the bonus."""
    return {
        "speculative_decoding": {
            "num_spec_steps": rounds,
            "num_tokens": tokens,
            "num_accepted_draft_tokens": tokens - 1 - rounds,
            "num_draft_tokens": 10 * rounds,
            "cache_hits": rounds,
            "cache_misses": 0,
        }
    }
