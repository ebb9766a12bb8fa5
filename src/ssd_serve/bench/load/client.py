"""The load benchmarks' HTTP client: streams answers of any OpenAI endpoint and notes when which tokens came.

While requests run, bytes are only given a time; they are read afterwards, so that the client takes as little
as it can of a core that a drafter may need. Knows the API as any client does, and nothing of the server
behind it.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

import httpx
import msgspec

from ssd_serve.bench.completions import Events, Speculation, Usage

_SILENCE_S = 300.0
"""A stream that says nothing for this long has failed; also the longest wait in the server's queue."""
_IDLE_CONNECTION_S = 2.0
"""Shorter than servers keep idle connections, so that none is used that the server has just closed."""
_START_S = 0.05
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go, and what they ask for besides their prompt.

    `exact`: answers must not end before they have all their tokens. `token_ids`: chunks are asked to name
    theirs, which tells how many each brings; not every server knows that. `more` is added to every body.
    """

    url: str
    temperature: float | None = None
    api_key: str | None = None
    chat: bool = False
    model: str | None = None
    exact: bool = True
    token_ids: bool = True
    more: Mapping[str, object] = field(default_factory=dict[str, object])

    @property
    def path(self) -> str:
        """Of the requests."""
        return CHAT if self.chat else COMPLETIONS

    def body(self, wanted: "LoadRequest") -> dict[str, object]:
        """One request. Optional fields are left out where nothing was said about them."""
        prompt = wanted.prompt if isinstance(wanted.prompt, str) else list(wanted.prompt)
        asked: dict[str, object] = (
            {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": wanted.tokens}
            if self.chat
            else {"prompt": prompt, "max_tokens": wanted.tokens}
        )
        asked |= {"seed": wanted.seed, "stream": True, "stream_options": {"include_usage": True}}
        optional: dict[str, object | None] = {
            "model": self.model,
            "temperature": self.temperature,
            "ignore_eos": self.exact or None,
            "return_token_ids": self.token_ids or None,
        }
        return {
            **asked,
            **{name: value for name, value in optional.items() if value is not None},
            **self.more,
        }


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request to send: prompt (ids, or text), how many tokens to generate at most, in an open loop its time
    of arrival, and the file that it goes on with, where it is known."""

    prompt: tuple[int, ...] | str
    tokens: int
    seed: int
    at_s: float = 0.0
    path: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request. Times in seconds of one clock; `arrivals` are (time, tokens) of each chunk.

    `due_s` is when the request should have been sent: what the client is late counts as waiting. Without an
    `error` the answer is complete. `text` are its tokens where chunks name them; where they do not, `counted`
    is what the server says it generated. `prompt_tokens` is what it says that it read.
    """

    due_s: float
    sent_s: float
    ended_s: float
    arrivals: tuple[tuple[float, int], ...]
    speculation: Speculation
    error: str = ""
    text: tuple[int, ...] = ()
    counted: int | None = None
    prompt_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens that arrived."""
        return sum(count for _, count in self.arrivals) if self.counted is None else self.counted

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between one chunk and the next."""
        return [later - sooner for (sooner, _), (later, _) in itertools.pairwise(self.arrivals)]

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.arrivals[0][0] - self.due_s

    @property
    def whole_s(self) -> float:
        """Time to the last token."""
        return self.arrivals[-1][0] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (last - first) / (tokens - 1); None for a single token."""
        if self.tokens < 2:
            return None
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / (self.tokens - 1)


@dataclass(slots=True)
class Recording:
    """A stream as it comes in: bytes with their times."""

    wanted: LoadRequest
    due_s: float = 0.0
    sent_s: float = 0.0
    ended_s: float = 0.0
    reads: list[tuple[float, bytes]] = field(default_factory=list[tuple[float, bytes]])
    error: str = ""


class LoadClient:
    """Sends requests to one server. Use as `async with`."""

    def __init__(self, endpoint: Endpoint, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._endpoint = endpoint
        self._http = open_client(endpoint.url, endpoint.api_key, transport)

    async def __aenter__(self) -> "LoadClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def closed_loop(self, wanted: Sequence[LoadRequest], concurrency: int) -> list[Answer]:
        """Send all requests, `concurrency` at a time, each as soon as another has ended."""
        waiting = iter(wanted)
        recordings: list[Recording] = []

        async def send_one_after_another() -> None:
            for each in waiting:
                recordings.append(Recording(each))
                await self.record(recordings[-1])

        await asyncio.gather(*(send_one_after_another() for _ in range(concurrency)))
        return [read(recording, self._endpoint.exact) for recording in recordings]

    async def open_loop(self, wanted: Sequence[LoadRequest], concurrency: int | None = None) -> list[Answer]:
        """Send each request at its time of arrival, however many are still running; with a `concurrency`
        those beyond it wait here."""
        start = time.perf_counter() + _START_S
        recordings = [Recording(each, due_s=start + each.at_s) for each in wanted]
        free = contextlib.nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)

        async def send_in_time(recording: Recording) -> None:
            await asyncio.sleep(max(0.0, recording.due_s - time.perf_counter()))
            async with free:
                await self.record(recording)

        await asyncio.gather(*(send_in_time(recording) for recording in recordings))
        return [read(recording, self._endpoint.exact) for recording in recordings]

    async def record(self, recording: Recording) -> None:
        """Stream one request into the recording; what goes wrong is noted there.

        Cancelling keeps what has come.
        """
        body = msgspec.json.encode(self._endpoint.body(recording.wanted))
        recording.sent_s = time.perf_counter()
        recording.due_s = recording.due_s or recording.sent_s
        try:
            recording.error = await stream(
                self._http,
                body,
                lambda data: recording.reads.append((time.perf_counter(), data)),
                self._endpoint.path,
            )
        finally:
            recording.ended_s = time.perf_counter()


async def stream(
    http: httpx.AsyncClient, body: bytes, take: Callable[[bytes], None], path: str = COMPLETIONS
) -> str:
    """Post a request and hand over what comes; returns what went wrong, empty: nothing."""
    try:
        async with http.stream("POST", path, content=body) as response:
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


def read(recording: Recording, exact: bool = True) -> Answer:
    """The recorded stream as an answer; one that is not whole has an error."""
    error, events = recording.error, Events()
    speculation, usage = Speculation(), Usage()
    said: list[tuple[float, int]] = []
    text: list[int] = []
    for at, data in recording.reads:
        for chunk in events.feed(data):
            if any(choice.says for choice in chunk.choices):
                said.append((at, len(chunk.token_ids)))
                text += chunk.token_ids
            if chunk.metrics is not None:
                speculation = chunk.metrics.speculative_decoding or speculation
            usage = chunk.usage or usage
            error = error or chunk.trouble
    # Where ids are told, text without any was held back; where none are, a chunk is a token or more.
    with_ids = any(count for _, count in said)
    arrivals = tuple((at, count or 1) for at, count in said if count or not with_ids)
    answer = Answer(
        *(recording.due_s, recording.sent_s, recording.ended_s, arrivals, speculation, error),
        text=tuple(text),
        counted=None if with_ids else usage.completion_tokens or None,
        prompt_tokens=usage.prompt_tokens or None,
    )
    wanted, tokens = recording.wanted.tokens, answer.tokens
    if error or (events.done and arrivals and (tokens == wanted or not exact)):
        return answer
    return replace(answer, error=f"the stream ended after {tokens} of {wanted} tokens")
