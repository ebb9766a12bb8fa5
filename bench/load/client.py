"""The load benchmark's HTTP client: streams completions and notes when which tokens came.

While requests run, bytes are only given a time; they are read afterwards, so that the client takes as little
as it can of a core that a drafter may need. Knows the completions API as any client does, and nothing of the
server behind it.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import httpx
import msgspec

_SILENCE_S = 300.0
"""A stream that says nothing for this long has failed; also the longest wait in the server's queue."""
_IDLE_CONNECTION_S = 2.0
"""Shorter than servers keep idle connections, so that none is used that the server has just closed."""
_START_S = 0.05
_DATA, _DONE, _END = b"data: ", b"[DONE]", b"\n\n"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request to send: prompt ids, how many tokens to generate, and in a replay its time of arrival."""

    prompt: tuple[int, ...]
    tokens: int
    seed: int
    at_s: float = 0.0


class Speculation(msgspec.Struct, frozen=True):
    """What a response tells about its speculation; nulls where the server does not know."""

    num_spec_steps: int = 0
    num_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_draft_tokens: int | None = None
    cache_hits: int | None = None
    cache_misses: int | None = None


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
        headers = {"Content-Type": "application/json"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(_SILENCE_S, connect=10.0, pool=None),
            limits=httpx.Limits(keepalive_expiry=_IDLE_CONNECTION_S),
            transport=transport,
            trust_env=False,
        )

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
        body = msgspec.json.encode(self._body(recording.wanted))
        recording.sent_s = time.perf_counter()
        recording.due_s = recording.due_s or recording.sent_s
        try:
            async with self._http.stream("POST", "/v1/completions", content=body) as response:
                if not response.is_success:
                    await response.aread()
                    recording.error = f"status {response.status_code}: {response.text[:200]}"
                else:
                    async for data in response.aiter_raw():
                        recording.reads.append((time.perf_counter(), data))
        except httpx.HTTPError as error:
            recording.error = f"{type(error).__name__}: {error}"
        finally:
            recording.ended_s = time.perf_counter()

    def _body(self, wanted: Wanted) -> dict[str, object]:
        """Exactly `wanted.tokens` tokens; their ids tell how many each chunk brings."""
        return {
            "prompt": wanted.prompt,
            "max_tokens": wanted.tokens,
            "seed": wanted.seed,
            "temperature": self._temperature,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] = []


class _Metrics(msgspec.Struct, frozen=True):
    speculative_decoding: Speculation = Speculation()


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    metrics: _Metrics | None = None
    error: dict[str, object] | None = None


def read(recording: Recording) -> Answer:
    """The recorded stream as an answer; one that is not whole has an error."""
    rest, error, done = b"", recording.error, False
    speculation = Speculation()
    arrivals: list[tuple[float, int]] = []
    for at, data in recording.reads:
        *events, rest = (rest + data).split(_END)
        for event in events:
            if not event.startswith(_DATA):
                continue
            if event == _DATA + _DONE:
                done = True
                continue
            chunk = msgspec.json.decode(event.removeprefix(_DATA), type=_Chunk)
            count = sum(len(choice.token_ids) for choice in chunk.choices)
            if count:
                arrivals.append((at, count))
            if chunk.metrics is not None:
                speculation = chunk.metrics.speculative_decoding
            if chunk.error is not None:
                error = error or str(chunk.error.get("message", "an error event"))
    tokens = sum(count for _, count in arrivals)
    if not error and not (done and tokens == recording.wanted.tokens):
        error = f"the stream ended after {tokens} of {recording.wanted.tokens} tokens"
    return Answer(recording.due_s, recording.sent_s, recording.ended_s, tuple(arrivals), speculation, error)
