"""A client for any OpenAI endpoint that streams answers; it records the arrival times of tokens.

While requests run, bytes only get a time stamp; they are parsed afterwards, so that the client uses as little
as possible of a core that a drafter may need.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import httpx
import msgspec

_FIELD, DONE = b"data:", b"[DONE]"
_SILENCE_S = 300.0
"""Timeout of a silent stream, and of waiting in the server's queue."""
_IDLE_CONNECTION_S = 2.0
"""Keep-alive time, shorter than that of servers, so that no request uses a connection that is being closed."""
_START_S = 0.05
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class _Delta(msgspec.Struct, frozen=True):
    """New content of a chat message; servers have two names for reasoning."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    """New text, and its ids if the server returns them."""

    text: str | None = ""
    token_ids: list[int] | None = None
    delta: _Delta | None = None

    @property
    def has_content(self) -> bool:
        """True if the chunk has any part of the answer."""
        delta = self.delta or _Delta()
        return bool(
            self.text or self.token_ids or delta.content or delta.reasoning_content or delta.reasoning
        )


class Usage(msgspec.Struct, frozen=True):
    """Token counts of the whole answer."""

    completion_tokens: int = 0
    prompt_tokens: int = 0


class Chunk(msgspec.Struct, frozen=True):
    """A server-sent event."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: dict[str, object] | str | None = None

    @property
    def token_ids(self) -> list[int]:
        """New token ids of all choices."""
        return [token for choice in self.choices for token in choice.token_ids or ()]

    @property
    def error_message(self) -> str:
        """The message of an error event; empty for other events."""
        message = self.error.get("message", "an error event") if isinstance(self.error, dict) else self.error
        return str(message or "")


class Events:
    """Incremental parser of a stream; `done` is True after the server's `[DONE]`."""

    def __init__(self) -> None:
        self.done = False
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """Yield the chunks that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(_FIELD):
                continue
            data = line.removeprefix(_FIELD).strip()
            if data == DONE:
                self.done = True
            else:
                yield msgspec.json.decode(data, type=Chunk)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's endpoint, and the fields of every request.

    `exact`: answers must have all their tokens (`ignore_eos`). `token_ids` requests the ids of every chunk,
    by which its tokens are counted; not every server has that field. `more` is added to every body.
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
        """Path of the requests."""
        return CHAT if self.chat else COMPLETIONS

    def body(self, wanted: "LoadRequest") -> dict[str, object]:
        """Return the body of a request; optional fields without a value are left out."""
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
    """A request: prompt (ids, or text), maximum of new tokens, seed, and its arrival in an open loop."""

    prompt: tuple[int, ...] | str
    tokens: int
    seed: int
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a request. Times are seconds of one clock; `arrivals` are (time, tokens) of each chunk.

    `due_s` is the scheduled time of sending. An answer without `error` is complete. `text` has its token ids
    if chunks name them; otherwise `counted` is the server's count. `prompt_tokens` is the server's count.
    """

    due_s: float
    sent_s: float
    ended_s: float
    arrivals: tuple[tuple[float, int], ...]
    error: str = ""
    text: tuple[int, ...] = ()
    counted: int | None = None
    prompt_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens that arrived."""
        return sum(count for _, count in self.arrivals) if self.counted is None else self.counted

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between one chunk and the next."""
        return [later - sooner for (sooner, _), (later, _) in itertools.pairwise(self.arrivals)]

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first token."""
        return self.arrivals[0][0] - self.sent_s

    @property
    def latency_s(self) -> float:
        """Seconds from sending to the last token."""
        return self.arrivals[-1][0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first, (last - first) / (tokens - 1); None for a single token."""
        if self.tokens < 2:
            return None
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / (self.tokens - 1)


@dataclass(slots=True)
class Recording:
    """A stream as it was received: bytes with their times."""

    wanted: LoadRequest
    due_s: float = 0.0
    sent_s: float = 0.0
    ended_s: float = 0.0
    reads: list[tuple[float, bytes]] = field(default_factory=list[tuple[float, bytes]])
    error: str = ""


async def send_load(
    http: httpx.AsyncClient, endpoint: Endpoint, requests: Sequence[LoadRequest], concurrency: int | None
) -> list[Answer]:
    """Send each request at its time of arrival; requests beyond `concurrency` wait in the client."""
    start = time.perf_counter() + _START_S
    recordings = [Recording(each, due_s=start + each.at_s) for each in requests]
    free = contextlib.nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)

    async def send_in_time(recording: Recording) -> None:
        await asyncio.sleep(max(0.0, recording.due_s - time.perf_counter()))
        async with free:
            await record(http, endpoint, recording)

    await asyncio.gather(*(send_in_time(recording) for recording in recordings))
    return [read(recording, endpoint.exact) for recording in recordings]


async def record(http: httpx.AsyncClient, endpoint: Endpoint, recording: Recording) -> None:
    """Stream one request into the recording, with any error; cancelling keeps what was received."""
    body = msgspec.json.encode(endpoint.body(recording.wanted))
    recording.sent_s = time.perf_counter()
    try:
        recording.error = await stream(
            http, body, lambda data: recording.reads.append((time.perf_counter(), data)), endpoint.path
        )
    finally:
        recording.ended_s = time.perf_counter()


async def stream(
    http: httpx.AsyncClient, body: bytes, take: Callable[[bytes], None], path: str = COMPLETIONS
) -> str:
    """Post a request and pass on what is received; return an error message, empty on success."""
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
    """Open a client that allows streams to be silent for minutes."""
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
    """Parse a recorded stream; an incomplete answer has an error."""
    error, events = recording.error, Events()
    usage = Usage()
    chunks: list[tuple[float, int]] = []
    text: list[int] = []
    for at, data in recording.reads:
        for chunk in events.feed(data):
            if any(choice.has_content for choice in chunk.choices):
                chunks.append((at, len(chunk.token_ids)))
                text += chunk.token_ids
            usage = chunk.usage or usage
            error = error or chunk.error_message
    # With ids, a chunk of text alone brings no token; without ids, a chunk counts as one token.
    with_ids = any(count for _, count in chunks)
    arrivals = tuple((at, count or 1) for at, count in chunks if count or not with_ids)
    answer = Answer(
        *(recording.due_s, recording.sent_s, recording.ended_s, arrivals, error),
        text=tuple(text),
        counted=None if with_ids else usage.completion_tokens or None,
        prompt_tokens=usage.prompt_tokens or None,
    )
    wanted, tokens = recording.wanted.tokens, answer.tokens
    if error or (events.done and arrivals and (tokens == wanted or not exact)):
        return answer
    return replace(answer, error=f"the stream ended after {tokens} of {wanted} tokens")
