"""Runs a generation task and writes its response, whole or streamed, in the words of one API.

Chat completions and completions write choices (`ChoiceSerializer`); responses and messages write one message
as items or blocks (`MessageStream`).
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import msgspec
from fastapi import Request, Response

from ssd_serve.base.messages import Ready, RoundTrace
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
from ssd_serve.server.openai.traces import trace_in_steps, trace_object
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

    prompt: int = 0
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
        self.last: Entry = {}
        """Last entry of the choice."""
        self.counts = TokenCounts()

    @abstractmethod
    def opening(self) -> Iterator[Event]:
        """Yield events before the first token."""

    def delta(self, entry: Entry) -> Iterator[Event]:
        """Yield events of new output."""
        delta: Mapping[str, Any] = entry["delta"]
        calls = delta.get("tool_calls", ())
        for call in calls:
            if "id" not in call:  # the rest of an earlier call comes before new text
                yield from self.arguments(call["function"]["arguments"])
        if delta.get("reasoning_content"):
            yield from self.thinking(delta["reasoning_content"])
        if delta.get("content"):
            yield from self.text(delta["content"], entry)
        for call in calls:
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
    def closing(self) -> Iterator[Event]:
        """Yield events of the end."""

    @abstractmethod
    def whole(self) -> Mapping[str, object]:
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
        events = _choice_events(task) if stream is None else _encoded(_message_events(task, stream))
        return EventStream(events, headers, service.limits.ping_s, partial(_failure, stream))
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

    texts = task.service.texts

    def write() -> Steps[list[msgspec.Raw]]:
        written: list[msgspec.Raw] = []
        for output in outputs:
            entry = yield from task.serializer.whole(output)
            if task.traced:
                entry["rounds"] = output.rounds
            if output.traces:
                entry["trace"] = yield from trace_in_steps(output.traces, texts, task.reveals_cache)
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
    traces: list[RoundTrace] = []
    texts = task.service.texts
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
            if delta.progress is not None:
                yield write({**base, "choices": [], "prompt_progress": delta.progress})
            tokens += len(delta.tokens)
            task.tenant.output(len(delta.tokens))
            if task.continuous_usage:
                base["usage"] = task.usage(tokens, ends)
            entry = task.serializer.delta(delta)
            if task.traced:
                rounds.setdefault(delta.choice, []).extend(delta.rounds)
                traces += delta.traces
                if entry is not None:
                    entry["rounds"] = rounds.pop(delta.choice)
                    if delta.choice == 0:
                        entry["trace"] = [trace_object(each, texts, task.reveals_cache) for each in traces]
                        traces.clear()
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


def _failure(stream: MessageStream | None, error: ApiError) -> bytes:
    return event(error.body()) if stream is None else named_event(*stream.failed(error))


async def _encoded(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for each in events:
            yield named_event(*each)


async def _whole_message(task: GenerationTask, stream: MessageStream) -> Mapping[str, object]:
    async for _ in _message_events(task, stream):
        pass
    return stream.whole()


async def _message_events(task: GenerationTask, stream: MessageStream) -> AsyncGenerator[Event, None]:
    """Run a task of one choice, and yield the events that a stream writes for it."""
    ends: dict[int, ChoiceEnd] = {}
    begun = thought = answered = False
    tokens = before_answer = 0
    stream.counts = TokenCounts(task.prompt_tokens, cached=task.cached_tokens(ends) or 0)
    async with task.run() as generation:
        async for delta in generation.deltas():
            if not begun:
                begun = True
                for each in stream.opening():
                    yield each
            tokens += len(delta.tokens)
            task.tenant.output(len(delta.tokens))
            if delta.end is not None:
                ends[0] = delta.end
            entry = task.serializer.delta(delta)
            written = cast(Entry, entry.get("delta", {}) if entry else {})
            thought = thought or "reasoning_content" in written
            answered = answered or bool(written.get("content") or written.get("tool_calls"))
            before_answer += 0 if answered else len(delta.tokens)
            if entry:
                stream.last = entry
                for each in stream.delta(entry):
                    yield each
    stream.counts = TokenCounts(
        task.prompt_tokens,
        tokens,
        task.cached_tokens(ends) or 0,
        before_answer if thought else 0,
        speculation(list(ends.values())) if ends else None,
    )
    for each in stream.closing():
        yield each
