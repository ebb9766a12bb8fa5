"""The load benchmark's HTTP client: streams completions and notes when which tokens came.

While requests run, bytes are only given a time; they are read afterwards, so that the client takes as little
as it can of a core that a drafter may need. Knows the completions API as any client does, and nothing of the
server behind it.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import httpx
import msgspec

from ssd_serve.bench.completions import Events, Speculation, request

_SILENCE_S = 300.0
"""A stream that says nothing for this long has failed; also the longest wait in the server's queue."""
_IDLE_CONNECTION_S = 2.0
"""Shorter than servers keep idle connections, so that none is used that the server has just closed."""
_START_S = 0.05


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request to send: prompt ids, how many tokens to generate, and in a replay its time of arrival."""

    prompt: tuple[int, ...]
    tokens: int
    seed: int
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request. Times in seconds of one clock; `arrivals` are (time, tokens) of each chunk.

    `due_s` is when the request should have been sent: what the client is late counts as waiting. Without an
    `error` the answer is complete.
    """

    due_s: float
    sent_s: float
    ended_s: float
    arrivals: tuple[tuple[float, int], ...]
    speculation: Speculation
    error: str = ""

    @property
    def tokens(self) -> int:
        """Tokens that arrived."""
        return sum(count for _, count in self.arrivals)

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.arrivals[0][0] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (last - first) / (tokens - 1); None for a single token."""
        if self.tokens < 2:
            return None
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / (self.tokens - 1)


@dataclass(slots=True)
class Recording:
    """A stream as it comes in: bytes with their times."""

    wanted: Wanted
    due_s: float = 0.0
    sent_s: float = 0.0
    ended_s: float = 0.0
    reads: list[tuple[float, bytes]] = field(default_factory=list[tuple[float, bytes]])
    error: str = ""


class LoadClient:
    """Sends requests to one server. Use as `async with`."""

    def __init__(
        self,
        url: str,
        temperature: float,
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._temperature = temperature
        self._http = open_client(url, api_key, transport)

    async def __aenter__(self) -> "LoadClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def closed_loop(self, wanted: Sequence[Wanted], concurrency: int) -> list[Answer]:
        """Send all requests, `concurrency` at a time, each as soon as another has ended."""
        waiting = iter(wanted)
        recordings: list[Recording] = []

        async def send_one_after_another() -> None:
            for each in waiting:
                recordings.append(Recording(each))
                await self.record(recordings[-1])

        await asyncio.gather(*(send_one_after_another() for _ in range(concurrency)))
        return [read(recording) for recording in recordings]

    async def open_loop(self, wanted: Sequence[Wanted]) -> list[Answer]:
        """Send each request at its time of arrival, however many are still running."""
        start = time.perf_counter() + _START_S
        recordings = [Recording(each, due_s=start + each.at_s) for each in wanted]

        async def send_in_time(recording: Recording) -> None:
            await asyncio.sleep(max(0.0, recording.due_s - time.perf_counter()))
            await self.record(recording)

        await asyncio.gather(*(send_in_time(recording) for recording in recordings))
        return [read(recording) for recording in recordings]

    async def record(self, recording: Recording) -> None:
        """Stream one request into the recording; what goes wrong is noted there.

        Cancelling keeps what has come.
        """
        wanted = recording.wanted
        asked = request(wanted.prompt, wanted.tokens, self._temperature, wanted.seed)
        body = msgspec.json.encode(asked | {"return_token_ids": True})  # they tell how many a chunk brings
        recording.sent_s = time.perf_counter()
        recording.due_s = recording.due_s or recording.sent_s
        try:
            recording.error = await stream(
                self._http, body, lambda data: recording.reads.append((time.perf_counter(), data))
            )
        finally:
            recording.ended_s = time.perf_counter()


async def stream(http: httpx.AsyncClient, body: bytes, take: Callable[[bytes], None]) -> str:
    """Post to `/v1/completions` and hand over what comes; returns what went wrong, empty: nothing."""
    try:
        async with http.stream("POST", "/v1/completions", content=body) as response:
            if not response.is_success:
                await response.aread()
                return f"status {response.status_code}: {response.text[:200]}"
            async for data in response.aiter_raw():
                take(data)
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def open_client(
    url: str, api_key: str | None = None, transport: httpx.AsyncBaseTransport | None = None
) -> httpx.AsyncClient:
    """Connections to one server, whose streams may be silent for minutes."""
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return httpx.AsyncClient(
        base_url=url,
        headers=headers,
        timeout=httpx.Timeout(_SILENCE_S, connect=10.0, pool=None),
        limits=httpx.Limits(keepalive_expiry=_IDLE_CONNECTION_S),
        transport=transport,
        trust_env=False,
    )


def read(recording: Recording) -> Answer:
    """The recorded stream as an answer; one that is not whole has an error."""
    error, events = recording.error, Events()
    speculation = Speculation()
    arrivals: list[tuple[float, int]] = []
    for at, data in recording.reads:
        for chunk in events.feed(data):
            if chunk.token_ids:
                arrivals.append((at, len(chunk.token_ids)))
            if chunk.metrics is not None:
                speculation = chunk.metrics.speculative_decoding or speculation
            error = error or chunk.trouble
    tokens = sum(count for _, count in arrivals)
    if not error and not (events.done and tokens == recording.wanted.tokens):
        error = f"the stream ended after {tokens} of {recording.wanted.tokens} tokens"
    return Answer(recording.due_s, recording.sent_s, recording.ended_s, tuple(arrivals), speculation, error)
