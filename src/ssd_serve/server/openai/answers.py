"""Turns a run into a response, whole or streamed, the same way for completions and chat.

What differs between the two is a `AnswerShape`. Knows neither request bodies nor the engine.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
from fastapi import Request, Response

from ssd_serve.base.messages import RequestOptions
from ssd_serve.server.access.auth import tenant_of
from ssd_serve.server.access.tenants import Tenant
from ssd_serve.server.engine.choice import ChoiceOutput, ChoiceDelta, ChoicePlan, ChoiceEnd
from ssd_serve.server.engine.generation import GenerationStream
from ssd_serve.server.errors import ApiError
from ssd_serve.server.http.worker_pool import Steps
from ssd_serve.server.http.middleware import REQUEST_ID_HEADER, log_as_request
from ssd_serve.server.http.middleware import path_within
from ssd_serve.server.http.streaming import DONE, EventStream, event, obfuscated, while_connected
from ssd_serve.server.observability.timing import FinishedRequest, RequestTrace, log_finished
from ssd_serve.server.openai.envelope import told_ignored
from ssd_serve.server.openai.replies import ResponseHead, speculation, timings, usage
from ssd_serve.server.service import Service

_SCORED_UNITS = 32
"""Writing a token with its log-probabilities takes as long as some other work for so many tokens."""


class AnswerShape(Protocol):
    """How one API writes its choices."""

    @property
    def whole_kind(self) -> str:
        """`object` of a whole response."""
        ...

    @property
    def chunk_kind(self) -> str:
        """`object` of a chunk of a stream."""
        ...

    def opening(self, choice: int) -> dict[str, object] | None:
        """What a choice says before its first token, in a stream."""
        ...

    def part(self, piece: ChoiceDelta) -> dict[str, object] | None:
        """A piece of a choice in a stream; None when there is nothing to tell."""
        ...

    def whole(self, choice: int, output: ChoiceOutput) -> Steps[dict[str, object]]:
        """The object of a complete choice."""
        ...

    def extra(self) -> dict[str, object]:
        """More fields of a whole response or a first chunk."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request, ready to run. `choices` is n: that many plans in a row share a prompt."""

    head: ResponseHead
    plans: Sequence[ChoicePlan]
    choices: int
    shape: AnswerShape
    stream: bool
    told_usage: Literal["never", "last", "always"]
    """Which chunks of a stream tell the usage."""
    cache_salt: str | None = None
    obfuscate: bool = False
    """Pad every chunk, so that its length does not reveal its text."""
    options: RequestOptions = RequestOptions()
    """Options for the engine, still without the salt."""
    traced: bool = False
    """Whether the tokens of each round are told."""
    told_figures: bool = True
    """Whether a stream's last chunk tells the figures of speculation."""
    manner: "Manner | None" = None
    """None: as chat completions and completions tell it."""

    @property
    def prompt_tokens(self) -> int:
        """A prompt counts once, however many choices it has."""
        return sum(len(self.plans[first].prompt) for first in range(0, len(self.plans), self.choices))

    @property
    def charged_tokens(self) -> int:
        """What a key is charged for before there is output: answers that go on are read again too."""
        return self.prompt_tokens + sum(len(plan.generated) for plan in self.plans)


@dataclass(frozen=True, slots=True)
class Visit:
    """A job, whose it is, and what may be told of it."""

    service: Service
    job: Job
    tenant: Tenant
    salt: bytes
    """The part of the prefix cache that the job reads and feeds."""
    path: str = ""
    trace: RequestTrace | None = None

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[GenerationStream, None]:
        """The job's choices. When they have ended, whatever way, that is told."""
        job = self.job
        run = GenerationStream(self.service, job.plans, msgspec.structs.replace(job.options, salt=self.salt))
        try:
            async with run:
                yield run
        finally:
            if run.courses:
                of = (self.path, self.tenant.name, job.prompt_tokens)
                log_finished(FinishedRequest(*of, run.courses, run.request_numbers), self.trace)

    def timings(self, tokens: int, endings: dict[int, ChoiceEnd]) -> dict[str, object]:
        """Where the time went; what was read of the prompt, and for how long, only to whom it may be told."""
        return timings(self.job.prompt_tokens, tokens, list(endings.values()), self._tells_cached)

    @property
    def _tells_cached(self) -> bool:
        """Whether only the client's own prompts can have been cached, or all may know of it."""
        return bool(self.salt) or self.service.settings.tell_cached_tokens

    def usage(self, tokens: int, endings: dict[int, ChoiceEnd]) -> dict[str, object]:
        """Usage so far. What was cached is told where only the client's own prompts can be."""
        job = self.job
        if not self._tells_cached:
            return usage(job.prompt_tokens, tokens, None)
        firsts = range(0, len(job.plans), job.choices)
        # An answer that goes on may have found some of its own tokens in the cache too.
        cached = sum(
            min(endings[first].figures.cached_prompt_tokens, len(job.plans[first].prompt))
            for first in firsts
            if first in endings
        )
        return usage(job.prompt_tokens, tokens, cached)


class Manner(Protocol):
    """How a run becomes a response."""

    async def whole(self, visit: Visit) -> Mapping[str, object]:
        """The body of a response."""
        ...

    def events(self, visit: Visit) -> AsyncGenerator[bytes, None]:
        """The events of a stream."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The last event of one that breaks off."""
        ...


class _InChoices:
    """By a job's `AnswerShape`."""

    async def whole(self, visit: Visit) -> Mapping[str, object]:
        return await _whole(visit)

    def events(self, visit: Visit) -> AsyncGenerator[bytes, None]:
        return _events(visit)

    def failed(self, error: ApiError) -> bytes:
        return event(error.body())


async def answer(service: Service, request: Request, job: Job) -> Response:
    """Run the job for as long as the client stays connected. Raises 429 where its key has no tokens left."""
    tenant = tenant_of(request)
    tenant.begin_prompt(job.charged_tokens)
    log_as_request(job.head.name)
    salt = service.tenants.salt(tenant, job.cache_salt)
    trace = getattr(request.state, "trace", None)
    visit = Visit(service, job, tenant, salt, path_within(request.scope), trace)
    headers = {REQUEST_ID_HEADER: job.head.name, **told_ignored(request)}
    manner = job.manner or _InChoices()
    if job.stream:
        return EventStream(manner.events(visit), headers, service.limits.ping_s, manner.failed)
    body = await while_connected(request.receive, manner.whole(visit))
    return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)


async def _whole(visit: Visit) -> dict[str, object]:
    job = visit.job
    outputs = [ChoiceOutput() for _ in job.plans]
    async with visit.run() as stream:
        async for piece in stream.deltas():
            outputs[piece.choice].add(piece)
            visit.tenant.output(len(piece.tokens))
    endings = {i: output.end for i, output in enumerate(outputs) if output.end is not None}

    def write() -> Steps[list[msgspec.Raw]]:
        written: list[msgspec.Raw] = []
        for i, output in enumerate(outputs):
            whole = yield from job.shape.whole(i, output)
            if job.traced:
                whole["rounds"] = output.rounds
            written.append(msgspec.Raw(msgspec.json.encode(whole)))
            yield
        return written

    units = sum(
        len(output.tokens) + _SCORED_UNITS * (len(output.logprobs) + len(output.prompt_logprobs))
        for output in outputs
    )
    choices = await visit.service.worker_pool.steps(units, write())
    return {
        **job.head.object(job.shape.whole_kind),
        "seed": job.head.seed,
        "choices": choices,
        "usage": visit.usage(sum(len(output.tokens) for output in outputs), endings),
        "metrics": _metrics(endings),
        "timings": visit.timings(sum(len(output.tokens) for output in outputs), endings),
        **job.shape.extra(),
    }


async def _events(visit: Visit) -> AsyncGenerator[bytes, None]:
    """The chunks of a stream, then the usage if it was asked for, then `[DONE]`."""
    job, shape, tokens, begun = visit.job, visit.job.shape, 0, False
    write = obfuscated if job.obfuscate else event
    endings: dict[int, ChoiceEnd] = {}
    rounds: dict[int, list[int]] = {}
    """Those that are not told yet, by choice."""
    base = job.head.object(shape.chunk_kind)
    if job.told_usage != "never":
        base["usage"] = visit.usage(0, {}) if job.told_usage == "always" else None
    async with visit.run() as stream:
        async for piece in stream.deltas():
            if not begun:
                begun = True
                for chunk in _openings(job, base):
                    yield write(chunk)
            tokens += len(piece.tokens)
            visit.tenant.output(len(piece.tokens))
            if job.told_usage == "always":
                base["usage"] = visit.usage(tokens, endings)
            part = shape.part(piece)
            if job.traced:
                rounds.setdefault(piece.choice, []).extend(piece.rounds)
                part = None if part is None else {**part, "rounds": rounds.pop(piece.choice)}
            last: dict[str, object] = {}
            if piece.end is not None:
                endings[piece.choice] = piece.end
                if len(endings) == len(job.plans) and job.told_figures:
                    last = {"metrics": _metrics(endings), "timings": visit.timings(tokens, endings)}
            if part is not None:
                yield write({**base, "choices": [part], **last})
    if job.told_usage != "never":
        totals = {"usage": visit.usage(tokens, endings)}
        if job.told_figures:
            totals |= {"metrics": _metrics(endings), "timings": visit.timings(tokens, endings)}
        yield write({**base, "choices": [], **totals})
    yield DONE


def _metrics(endings: dict[int, ChoiceEnd]) -> dict[str, object]:
    """Speculation figures over all choices."""
    complete = all(ending.complete for ending in endings.values())
    return speculation([ending.figures for ending in endings.values()], complete)


def _openings(job: Job, base: dict[str, object]) -> list[dict[str, object]]:
    """First chunks: the very first also tells the seed."""
    entries = [job.shape.opening(choice) for choice in range(len(job.plans))]
    chunks: list[dict[str, object]] = [{**base, "choices": [entry]} for entry in entries if entry is not None]
    if not chunks:
        chunks = [{**base, "choices": []}]
    chunks[0] = {**chunks[0], "seed": job.head.seed, **job.shape.extra()}
    return chunks
