"""Runs a generation task and writes its response, whole or streamed, in the words of one API.

Chat completions and completions write choices (`ChoiceSerializer`); responses and messages write one message
as items or blocks (`MessageStream`).
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response

from ssd_serve.base.messages import Ready
from ssd_serve.server.engine.choice import ChoiceEnd, ChoiceOutput
from ssd_serve.server.errors import ApiError
from ssd_serve.server.http.middleware import REQUEST_ID_HEADER, log_as_request
from ssd_serve.server.http.streaming import (
    DONE,
    EventStream,
    event,
    named_event,
    obfuscated,
    while_connected,
)
from ssd_serve.server.http.worker_pool import Steps
from ssd_serve.server.openai.protocol import GenerationRequest
from ssd_serve.server.openai.serialize import ResponseHead, speculation
from ssd_serve.server.openai.tasks import GenerationTask
from ssd_serve.server.openai.unknown_fields import ignored_header
from ssd_serve.server.service import Service

_SCORED_TOKEN_UNITS = 32
"""Writing a token with log-probabilities costs as much as other work for so many tokens."""

Body = TypeVar("Body", bound=GenerationRequest)
Entry = Mapping[str, Any]
"""A choice's entry in a chunk of chat completions."""
Event = tuple[str, dict[str, object]]
"""Name and data of a server-sent event."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens so far. `cached` is 0 where it would reveal other users' prompts."""

    prompt: int
    output: int = 0
    cached: int = 0
    thinking: int = 0
    figures: Mapping[str, object] | None = None
    """Speculation figures, at the end."""


class MessageStream(ABC):
    """Writes one message as a list of blocks: thinking, text and tool calls.

    Methods are called in the order of their definition; `whole` only where nothing is streamed.
    """

    def __init__(self, head: ResponseHead) -> None:
        self.head = head
        self.blocks: list[dict[str, Any]] = []
        self.is_open = False
        """True while the last block continues."""

    @abstractmethod
    def opening(self, counts: TokenCounts) -> Iterator[Event]:
        """Yield events before the first token."""

    def delta(self, entry: Entry) -> Iterator[Event]:
        """Yield events of new output."""
        delta: Mapping[str, Any] = entry["delta"]
        if delta.get("reasoning_content"):
            yield from self.thinking(delta["reasoning_content"])
        if delta.get("content"):
            yield from self.text(delta["content"], entry)
        for call in delta.get("tool_calls", ()):
            function: Mapping[str, str] = call["function"]
            if "id" in call:
                yield from self.end_block()
                yield from self.begin_call(call["id"], function["name"])
            if function["arguments"]:
                yield from self.arguments(function["arguments"])

    @abstractmethod
    def thinking(self, text: str) -> Iterator[Event]: ...

    @abstractmethod
    def text(self, text: str, entry: Entry) -> Iterator[Event]: ...

    @abstractmethod
    def begin_call(self, identifier: str, name: str) -> Iterator[Event]: ...

    @abstractmethod
    def arguments(self, text: str) -> Iterator[Event]: ...

    @abstractmethod
    def end_block(self) -> Iterator[Event]:
        """Yield the end of the last block, if it is open."""

    @abstractmethod
    def closing(self, entry: Entry, counts: TokenCounts) -> Iterator[Event]:
        """Yield events of the end; `entry` is the last one."""

    @abstractmethod
    def whole(self, entry: Entry, counts: TokenCounts) -> Mapping[str, object]:
        """Return the whole response."""

    @abstractmethod
    def failed(self, error: ApiError) -> Event:
        """Return the last event of a stream that breaks off."""


async def handle_generation(
    service: Service,
    request: Request,
    model: type[Body],
    plan: Callable[[Body, Ready, Request], Coroutine[Any, Any, GenerationTask]],
    message_stream: Callable[[Body, ResponseHead], MessageStream] | None = None,
) -> Response:
    """Read and check a body, run the task that `plan` makes of it, and respond.

    The response is written by `message_stream`, or as choices without it.
    """
    ready = service.require_ready()
    service.require_room(1)

    async def work(body: Body) -> tuple[GenerationTask, MessageStream | None]:
        task = await plan(body, ready, request)
        return task, message_stream(body, task.head) if message_stream is not None else None

    task, stream = await service.bodies.use(request, model, ready, work)
    task.charge()
    log_as_request(task.head.name)
    headers = {REQUEST_ID_HEADER: task.head.name, **ignored_header(request)}
    if task.streamed:
        if stream is None:
            return EventStream(_choice_events(task), headers, service.limits.ping_s, _failed_choices)
        failed = _named_failure(stream)
        return EventStream(_message_events(task, stream), headers, service.limits.ping_s, failed)
    whole = _whole_choices(task) if stream is None else _whole_message(task, stream)
    found = await while_connected(request.receive, whole)
    return Response(msgspec.json.encode(found), media_type="application/json", headers=headers)


async def _whole_choices(task: GenerationTask) -> Mapping[str, object]:
    outputs = [ChoiceOutput(choice) for choice in range(len(task.plans))]
    async with task.run() as stream:
        async for delta in stream.deltas():
            outputs[delta.choice].add(delta)
            task.tenant.output(len(delta.tokens))
    ends = {output.choice: output.end for output in outputs if output.end is not None}

    def write() -> Steps[list[msgspec.Raw]]:
        written: list[msgspec.Raw] = []
        for output in outputs:
            entry = yield from task.serializer.whole(output)
            if task.traced:
                entry["rounds"] = output.rounds
            written.append(msgspec.Raw(msgspec.json.encode(entry)))
            yield
        return written

    tokens = sum(len(output.tokens) for output in outputs)
    scored = sum(len(output.logprobs) + len(output.prompt_logprobs) for output in outputs)
    choices = await task.service.worker_pool.steps(tokens + _SCORED_TOKEN_UNITS * scored, write())
    return {
        **task.head.object(task.serializer.whole_kind),
        "seed": task.head.seed,
        "choices": choices,
        "usage": task.usage(tokens, ends),
        "metrics": speculation(list(ends.values())),
        "timings": task.timings(tokens, ends),
        **task.serializer.extra_fields(),
    }


async def _choice_events(task: GenerationTask) -> AsyncGenerator[bytes, None]:
    """Yield chunks, then the usage where requested, then `[DONE]`."""
    write = obfuscated if task.obfuscated else event
    tokens, begun = 0, False
    ends: dict[int, ChoiceEnd] = {}
    rounds: dict[int, list[int]] = {}
    """Rounds that are not reported yet, by choice."""
    base = task.head.object(task.serializer.chunk_kind)
    if task.final_usage:
        base["usage"] = task.usage(0, {}) if task.continuous_usage else None

    def figures() -> dict[str, object]:
        return {"metrics": speculation(list(ends.values())), "timings": task.timings(tokens, ends)}

    async with task.run() as stream:
        async for delta in stream.deltas():
            if not begun:
                begun = True
                for chunk in _openings(task, base):
                    yield write(chunk)
            tokens += len(delta.tokens)
            task.tenant.output(len(delta.tokens))
            if task.continuous_usage:
                base["usage"] = task.usage(tokens, ends)
            entry = task.serializer.delta(delta)
            if task.traced:
                rounds.setdefault(delta.choice, []).extend(delta.rounds)
                if entry is not None:
                    entry["rounds"] = rounds.pop(delta.choice)
            if delta.end is not None:
                ends[delta.choice] = delta.end
            if entry is not None:
                chunk = {**base, "choices": [entry]}
                if delta.end is not None and len(ends) == len(task.plans) and task.stream_figures:
                    chunk |= figures()
                yield write(chunk)
    if task.final_usage:
        last: dict[str, object] = {**base, "choices": [], "usage": task.usage(tokens, ends)}
        yield write({**last, **figures()} if task.stream_figures else last)
    yield DONE


def _openings(task: GenerationTask, base: dict[str, object]) -> list[dict[str, object]]:
    """Return the first chunks; the very first one also has the seed."""
    entries = [task.serializer.opening(choice) for choice in range(len(task.plans))]
    chunks: list[dict[str, object]] = [{**base, "choices": [entry]} for entry in entries if entry is not None]
    if not chunks:
        chunks = [{**base, "choices": []}]
    chunks[0] |= {"seed": task.head.seed, **task.serializer.extra_fields()}
    return chunks


def _failed_choices(error: ApiError) -> bytes:
    return event(error.body())


def _named_failure(stream: MessageStream) -> Callable[[ApiError], bytes]:
    return lambda error: named_event(*stream.failed(error))


async def _whole_message(task: GenerationTask, stream: MessageStream) -> Mapping[str, object]:
    run = _MessageRun(task, stream)
    async for _ in run.events():
        pass
    return stream.whole(run.last, run.counts)


async def _message_events(task: GenerationTask, stream: MessageStream) -> AsyncGenerator[bytes, None]:
    async for each in _MessageRun(task, stream).events():
        yield named_event(*each)


class _MessageRun:
    """Runs a task of one choice and writes it to a `MessageStream`."""

    def __init__(self, task: GenerationTask, stream: MessageStream) -> None:
        self._task = task
        self._stream = stream
        self.last: Entry = {}
        """Last entry of the choice."""
        self.counts = TokenCounts(task.prompt_tokens, cached=task.cached_tokens({}) or 0)

    async def events(self) -> AsyncGenerator[Event, None]:
        task, stream, begun, tokens, thinking = self._task, self._stream, False, 0, _ThinkingCount()
        ends: dict[int, ChoiceEnd] = {}
        async with task.run() as generation:
            async for delta in generation.deltas():
                if not begun:
                    begun = True
                    for each in stream.opening(self.counts):
                        yield each
                tokens += len(delta.tokens)
                task.tenant.output(len(delta.tokens))
                if delta.end is not None:
                    ends[0] = delta.end
                entry = task.serializer.delta(delta)
                thinking.add({} if entry is None else entry["delta"], len(delta.tokens))
                if entry is not None:
                    self.last = entry
                    for each in stream.delta(entry):
                        yield each
        figures = speculation(list(ends.values())) if ends else None
        cached = task.cached_tokens(ends) or 0
        self.counts = TokenCounts(task.prompt_tokens, tokens, cached, thinking.tokens, figures)
        for each in stream.closing(self.last, self.counts):
            yield each


class _ThinkingCount:
    """Counts the tokens before the first text or call, where there was thinking."""

    def __init__(self) -> None:
        self.tokens = 0
        self._before = 0
        self._over = False

    def add(self, delta: Any, tokens: int) -> None:
        self._over = self._over or bool(delta.get("content") or delta.get("tool_calls"))
        if not self._over:
            self._before += tokens
        if "reasoning_content" in delta or self.tokens:
            self.tokens = self._before
