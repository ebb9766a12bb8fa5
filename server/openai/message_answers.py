"""Answers of one message, told as another API than chat completions tells them.

What the message holds is found as for chat completions, and a `MessageVoice` says it in its API's words.
Knows runs and streams, no API's names.
"""

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import msgspec
from fastapi import Request, Response

from ssd_serve.server.access.auth import tenant_of
from ssd_serve.server.engine.generation import ChoiceOutput, Ending
from ssd_serve.server.errors import ApiError
from ssd_serve.server.http.request_ids import HEADER, request_name
from ssd_serve.server.http.streaming import EventStream, named_event, while_connected
from ssd_serve.server.openai.answers import Job, Visit, output_units
from ssd_serve.server.openai.envelope import told_ignored
from ssd_serve.server.openai.protocol import GenerationRequest
from ssd_serve.server.openai.replies import speculation
from ssd_serve.server.service import Service

Entry = Mapping[str, Any]
"""A choice, or a piece of one, as chat completions tell it."""
Told = tuple[str, dict[str, object]]
"""An event of a stream: its name, and what it says."""
Body = TypeVar("Body", bound=GenerationRequest)


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Tokens so far. `cached_tokens` are 0 where they would tell what others have asked."""

    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    thought_tokens: int = 0
    metrics: Mapping[str, object] | None = None
    """Figures of speculation, once it is over."""


class MessageVoice(Protocol):
    """How one API tells a message. Of a stream all methods are called but `whole`, in this order."""

    def opening(self, counted: TokenCount) -> Iterable[Told]:
        """Before the first token."""
        ...

    def part(self, entry: Entry) -> Iterable[Told]:
        """More of the message."""
        ...

    def closing(self, entry: Entry, counted: TokenCount) -> Iterable[Told]:
        """The end; `entry` is the last one."""
        ...

    def whole(self, entry: Entry, counted: TokenCount) -> Mapping[str, object]:
        """All of it."""
        ...

    def failed(self, error: ApiError) -> Told:
        """In a stream that has begun."""
        ...


async def read_and_answered(
    service: Service,
    request: Request,
    kind: type[Body],
    plan: Callable[[Body, str], Coroutine[Any, Any, tuple[Job, MessageVoice]]],
) -> Response:
    """Read a body of this kind, let `plan` make a job of one choice of it, run that, answer."""
    ready = service.require_ready()
    service.require_room(1)
    job, voice = await service.bodies.use(
        request, kind, ready, lambda body: plan(body, request_name(request, body.request_id))
    )
    tenant = tenant_of(request)
    tenant.begin_prompt(job.charged_tokens)
    visit = Visit(service, job, tenant, service.tenants.salt(tenant, job.asked.cache_salt))
    headers = {HEADER: job.head.name, **told_ignored(request)}
    if job.stream:
        return EventStream(_events(visit, voice), headers, service.limits.ping_s, _failed(voice))
    body = await while_connected(request.receive, _whole(visit, voice))
    return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)


def _failed(voice: MessageVoice) -> Callable[[ApiError], bytes]:
    return lambda error: named_event(*voice.failed(error))


async def _whole(visit: Visit, voice: MessageVoice) -> Mapping[str, object]:
    output, thoughts = ChoiceOutput(), _ThoughtCount()
    async with visit.run() as run:
        async for piece in run.pieces():
            output.add(piece)
            visit.tenant.output(len(piece.tokens))
    steps = visit.job.shape.whole(0, output)
    entry = await visit.service.off_loop.steps(output_units(output), steps)
    thoughts.whole(entry["message"], len(output.tokens))
    return voice.whole(entry, _counted(visit, len(output.tokens), thoughts.tokens, output.ending))


async def _events(visit: Visit, voice: MessageVoice) -> AsyncGenerator[bytes, None]:
    tokens, begun, thoughts = 0, False, _ThoughtCount()
    entry: Entry = {}
    ending: Ending | None = None
    async with visit.run() as run:
        async for piece in run.pieces():
            if not begun:
                begun = True
                for told in voice.opening(_counted(visit, 0, 0, None)):
                    yield named_event(*told)
            tokens += len(piece.tokens)
            visit.tenant.output(len(piece.tokens))
            ending = piece.ending or ending
            part = visit.job.shape.part(piece)
            thoughts.part({} if part is None else part["delta"], len(piece.tokens))
            if part is not None:
                entry = part
                for told in voice.part(part):
                    yield named_event(*told)
    for told in voice.closing(entry, _counted(visit, tokens, thoughts.tokens, ending)):
        yield named_event(*told)


def _counted(visit: Visit, tokens: int, thoughts: int, ending: Ending | None) -> TokenCount:
    usage = cast("Mapping[str, Any]", visit.usage(tokens, {} if ending is None else {0: ending}))
    cached: Mapping[str, int] = usage["prompt_tokens_details"] or {}
    return TokenCount(
        usage["prompt_tokens"],
        tokens,
        cached.get("cached_tokens", 0),
        thoughts,
        None if ending is None else speculation([ending.figures], ending.complete),
    )


class _ThoughtCount:
    """Counts the tokens that came before the first word or call, where there were thoughts."""

    def __init__(self) -> None:
        self.tokens = 0
        self._before = 0
        self._over = False

    def part(self, delta: Any, tokens: int) -> None:
        self._over = self._over or bool(delta.get("content") or delta.get("tool_calls"))
        if not self._over:
            self._before += tokens
        if "reasoning_content" in delta or self.tokens:
            self.tokens = self._before

    def whole(self, message: Any, tokens: int) -> None:
        """Of a message that was not told in pieces: by the share of its characters."""
        thoughts, rest = len(message.get("reasoning_content") or ""), len(message["content"] or "")
        rest += sum(len(call["function"]["arguments"]) for call in message.get("tool_calls", ()))
        self.tokens = round(tokens * thoughts / max(1, thoughts + rest))
