"""The clients of the fault benchmark: each streams one request and keeps its tokens with their times.

Knows the completions API as any client does, and nothing of faults.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import msgspec

_SILENCE_S = 300.0
_DATA, _END = b"data: {", b"\n\n"
_TEXTS = ("def f(", "import os\n", "class Tree:\n    def", "for index in range(", "# A list of", "try:\n    ")


@dataclass(frozen=True, slots=True)
class Wish:
    """A request whose text is decided: ids of its prompt, seed and temperature."""

    prompt: tuple[int, ...]
    seed: int
    temperature: float
    tokens: int

    def body(self, had: Sequence[int]) -> dict[str, object]:
        """As the API takes it, from who has these tokens of the answer already."""
        return {
            "prompt": self.prompt,
            "max_tokens": self.tokens,
            "seed": self.seed,
            "temperature": self.temperature,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "generated_token_ids": [had],
        }


@dataclass(slots=True)
class Heard:
    """What one client got: token ids, the time of each, and what went wrong."""

    wish: Wish
    tokens: list[int] = field(default_factory=list[int])
    times: list[float] = field(default_factory=list[float])
    error: str = ""

    def stall(self, since: float) -> tuple[float, float]:
        """The longest time without a token that ended after `since`: its end and its length, in seconds."""
        gaps = [
            (later - sooner, later)
            for sooner, later in zip(self.times, self.times[1:], strict=False)
            if later > since
        ]
        length, end = max(gaps, default=(0.0, since))
        return end, length


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None


class _Error(msgspec.Struct, frozen=True):
    message: str = ""


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    error: _Error | None = None


def wishes(url: str, count: int, tokens: int) -> list[Wish]:
    """Half of them greedy, half sampled at temperature 1."""
    found: list[Wish] = []
    with httpx.Client(base_url=url, timeout=30.0, trust_env=False) as http:
        for number in range(count):
            text = _TEXTS[number // 2 % len(_TEXTS)] + " " * (number // (2 * len(_TEXTS)))
            ids = http.post("/tokenize", json={"prompt": text}).raise_for_status().json()["tokens"]
            found.append(Wish(tuple(ids), 1000 + number, float(number % 2), tokens))
    return found


class Clients:
    """Streams wishes, all at once, each behind the tokens that were heard of it before."""

    def __init__(self, url: str, heard: Sequence[Heard]) -> None:
        self.heard = heard
        self._http = httpx.AsyncClient(
            base_url=url, timeout=httpx.Timeout(_SILENCE_S, connect=10.0), trust_env=False
        )
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Send all."""
        self._tasks = [asyncio.create_task(self._stream(heard)) for heard in self.heard]

    async def until_each_has(self, tokens: int) -> None:
        """Wait until every request that did not fail has so many tokens."""
        while not all(len(heard.tokens) >= tokens or heard.error for heard in self.heard):
            await asyncio.sleep(0.005)

    async def end(self) -> None:
        """Wait for all ends."""
        await asyncio.gather(*self._tasks)
        await self._http.aclose()

    async def _stream(self, heard: Heard) -> None:
        heard.error, pending = "", b""
        if len(heard.tokens) == heard.wish.tokens:
            return
        body = heard.wish.body(heard.tokens)
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if not response.is_success:
                    await response.aread()
                    heard.error = f"status {response.status_code}"
                    return
                async for data in response.aiter_raw():
                    *events, pending = (pending + data).split(_END)
                    for event in events:
                        _take(heard, event)
        except httpx.HTTPError as error:
            heard.error = f"{type(error).__name__}"


def _take(heard: Heard, event: bytes) -> None:
    if not event.startswith(_DATA):
        return
    chunk = msgspec.json.decode(event[len(_DATA) - 1 :], type=_Chunk)
    if chunk.error is not None:
        heard.error = chunk.error.message
    for choice in chunk.choices:
        for token in choice.token_ids or ():
            heard.tokens.append(token)
            heard.times.append(time.monotonic())
