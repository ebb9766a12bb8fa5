"""The clients of a soak: random requests of every kind from a seed, and counts of their outcomes."""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

_SLOW_READ_S = 0.05
_MAX_FAILURES = 20
_TIMEOUT_S = 120.0
_WORDS = (
    "def ",
    "return ",
    "self",
    "import os\n",
    "for each in ",
    "class ",
    "x = 1\n",
    "if ",
    "# ",
    "print(",
)
_BAD: tuple[dict[str, Any], ...] = (
    {"prompt": "x", "max_tokens": -2},
    {"prompt": "x", "temperature": "hot"},
    {"prompt": "x", "top_p": 7},
    {"prompt": 3.5},
    {"prompt": "x", "max_tokens": 10_000_000},
    {"prompt": [-5, 2]},
    {"prompt": "x", "no_such_field": 1, "n": 0},
)
KINDS: Mapping[str, float] = {
    "whole": 3,
    "stream": 4,
    "chat": 2,
    "disconnect": 3,
    "slow": 1,
    "bad": 1,
}
"""Relative frequency of each kind of request."""
PROBE: Mapping[str, Any] = {
    "prompt": "def read_lines(path):",
    "max_tokens": 32,
    "seed": 7,
    "temperature": 0.8,
}


@dataclass(slots=True)
class Counts:
    """Outcomes of all requests."""

    done: Counter[str] = field(default_factory=Counter[str])
    failures: list[str] = field(default_factory=list[str])
    failed: int = 0
    probes: int = 0
    probe_text: str | None = None

    def fail(self, text: str) -> None:
        """Count a failure and keep the first messages."""
        self.failed += 1
        if len(self.failures) < _MAX_FAILURES:
            self.failures.append(text[:300])


class SoakClients:
    """`clients` that send requests until `stop` is set; `kinds` are relative frequencies."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        kinds: Mapping[str, float],
        clients: int,
        seed: int,
        context: int,
        counted: Counts,
    ) -> None:
        self._http = http
        self._kinds, self._weights = list(kinds), list(kinds.values())
        self._sources = [random.Random(f"{seed}:{index}") for index in range(clients)]
        self._context = context
        self._counted = counted
        self.stop = asyncio.Event()

    async def run(self) -> None:
        """Send until `stop` is set; running requests are completed."""
        await asyncio.gather(*(self._one(source) for source in self._sources))

    async def _one(self, source: random.Random) -> None:
        while not self.stop.is_set():
            kind = source.choices(self._kinds, self._weights)[0]
            try:
                await self._ask(kind, source)
                self._counted.done[kind] += 1
            except (httpx.HTTPError, KeyError, ValueError) as error:
                self._counted.fail(f"{kind}: {type(error).__name__}: {error}")
            await asyncio.sleep(source.random() * 0.1)

    async def _ask(self, kind: str, source: random.Random) -> None:
        if kind == "bad":
            await self._bad(source)
            return
        chat = kind == "chat"
        body = self._body(source, chat)
        path = "/v1/chat/completions" if chat else "/v1/completions"
        if kind == "whole" or (chat and source.random() < 0.5):
            self._whole((await self._http.post(path, json=body)), body)
        elif kind == "disconnect" and source.random() < 0.4:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._http.post(path, json=body), source.uniform(0.01, 0.5))
        else:
            leave = source.randrange(1, 12) if kind == "disconnect" else None
            await self._stream(path, body, leave, _SLOW_READ_S if kind == "slow" else 0.0)

    def _whole(self, answer: httpx.Response, body: Mapping[str, Any]) -> None:
        if answer.status_code != 200:
            self._counted.fail(f"status {answer.status_code}: {answer.text[:200]}")
        elif len(answer.json()["choices"]) != body.get("n", 1):
            self._counted.fail("an answer with too few choices")

    async def _stream(self, path: str, body: Mapping[str, Any], leave: int | None, pause_s: float) -> None:
        """Read to the end, or disconnect after `leave` chunks."""
        last = ""
        async with self._http.stream("POST", path, json={**body, "stream": True}) as response:
            if response.status_code != 200:
                await response.aread()
                self._counted.fail(f"status {response.status_code}: {response.text[:200]}")
                return
            chunks = 0
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                last, chunks = line, chunks + 1
                if chunks == leave:
                    return
                if '"error"' in line and "error" in json.loads(line.removeprefix("data: ")):
                    self._counted.fail(f"an error within a stream: {line[:200]}")
                await asyncio.sleep(pause_s)
        if last != "data: [DONE]":
            self._counted.fail(f"a stream ended with {last[:100]!r}")

    async def _bad(self, source: random.Random) -> None:
        answer = await self._http.post("/v1/completions", json=source.choice(_BAD))
        if not 400 <= answer.status_code < 500:
            self._counted.fail(f"a bad request got status {answer.status_code}: {answer.text[:200]}")

    def _body(self, source: random.Random, chat: bool) -> dict[str, Any]:
        """Return a request; prompts share prefixes."""
        most = max(8, self._context // 8)
        text = "import sys\n" * source.choice((0, 2, most // 8)) + "".join(
            source.choices(_WORDS, k=source.choice((1, 4, 12)))
        )
        body: dict[str, Any] = {
            "max_tokens": source.randrange(1, min(96, most)),
            "temperature": source.choice((0.0, 0.0, 0.7, 1.0)),
            "seed": source.randrange(1 << 32),
        }
        body.update({"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text})
        extras: tuple[dict[str, Any], ...] = (
            {},
            {"stop": ["return", "\n\n"]},
            {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2},
            {"n": 3},
            {"top_p": 0.9, "top_k": 20},
            {"presence_penalty": 0.5, "frequency_penalty": 0.2},
            {"ignore_eos": True, "min_tokens": 1},
        )
        return {**body, **source.choice(extras)}


async def probe(http: httpx.AsyncClient, counted: Counts) -> None:
    """Send the same request as always; its text must not change."""
    try:
        answer = await http.post("/v1/completions", json=dict(PROBE))
        text = str(answer.json()["choices"][0]["text"])
    except (httpx.HTTPError, KeyError, ValueError) as error:
        counted.fail(f"probe: {type(error).__name__}: {error}")
        return
    counted.probes += 1
    if counted.probe_text is None:
        counted.probe_text = text
    elif text != counted.probe_text:
        counted.fail(f"the probe's text has changed: {text!r} instead of {counted.probe_text!r}")


async def can_chat(http: httpx.AsyncClient) -> bool:
    """Return True if the target has a chat template."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    return (await http.post("/v1/chat/completions", json=body)).status_code == 200


def open_client(url: str) -> httpx.AsyncClient:
    """Open a client with a long timeout."""
    return httpx.AsyncClient(
        base_url=url,
        timeout=httpx.Timeout(_TIMEOUT_S),
        limits=httpx.Limits(keepalive_expiry=2.0),
        trust_env=False,
    )
