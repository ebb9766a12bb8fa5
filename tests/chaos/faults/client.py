"""The clients of the fault benchmark: each streams one request and keeps its tokens with their times.

Knows the completions API as any client does, and nothing of faults.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import msgspec

from ssd_serve.bench.completions import Events, request
from ssd_serve.bench.load.client import open_client, stream

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
        asked = request(self.prompt, self.tokens, self.temperature, self.seed)
        return asked | {"return_token_ids": True, "generated_token_ids": [had]}


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


def over_before(heard: Sequence[Heard], moment: float) -> bool:
    """Whether nobody got a token after this moment, of `time.monotonic`."""
    return all(at <= moment for one in heard for at in one.times)


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
        self._http = open_client(url)
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
        heard.error, events = "", Events()
        if len(heard.tokens) == heard.wish.tokens:
            return

        def take(data: bytes) -> None:
            for chunk in events.feed(data):
                heard.error = heard.error or chunk.trouble
                heard.tokens += chunk.token_ids
                heard.times += [time.monotonic()] * len(chunk.token_ids)

        error = await stream(self._http, msgspec.json.encode(heard.wish.body(heard.tokens)), take)
        heard.error = heard.error or error.partition(":")[0]
