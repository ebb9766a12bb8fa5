"""Turns a run into a response, whole or streamed, the same way for completions and chat.

What differs between the two is a `Shape`. Knows neither request bodies nor the engine.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
from fastapi import Request, Response

from ssd_serve.server.generation import Ending, Output, Piece, Plan, Run
from ssd_serve.server.naming import HEADER
from ssd_serve.server.replies import Head, speculation, usage
from ssd_serve.server.service import Service
from ssd_serve.server.streaming import DONE, EventStream, event, while_connected


class Shape(Protocol):
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

    def part(self, piece: Piece) -> dict[str, object] | None:
        """A piece of a choice in a stream; None when there is nothing to tell."""
        ...

    def whole(self, choice: int, output: Output) -> dict[str, object]:
        """A whole choice."""
        ...

    def extra(self) -> dict[str, object]:
        """More fields of a whole response or a first chunk."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request, ready to run. `choices` is n: that many plans in a row share a prompt."""

    head: Head
    plans: Sequence[Plan]
    choices: int
    shape: Shape
    stream: bool
    told_usage: Literal["never", "last", "always"]
    """Which chunks of a stream tell the usage."""

    def usage(self, tokens: int, endings: dict[int, Ending]) -> dict[str, object]:
        """Usage at the end; a prompt counts once, however many choices it has."""
        firsts = range(0, len(self.plans), self.choices)
        prompt_tokens = sum(len(self.plans[first].prompt) for first in firsts)
        # An answer that goes on may have found some of its own tokens in the cache too.
        cached = sum(
            min(endings[first].figures.cached_prompt_tokens, len(self.plans[first].prompt))
            for first in firsts
            if first in endings
        )
        return usage(prompt_tokens, tokens, cached)


async def answer(service: Service, request: Request, job: Job) -> Response:
    """Run the job for as long as the client stays connected."""
    headers = {HEADER: job.head.name}
    if job.stream:
        return EventStream(_events(service, job), headers, service.limits.ping_s)
    body = await while_connected(request.receive, _whole(service, job))
    return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)


async def _whole(service: Service, job: Job) -> dict[str, object]:
    outputs = [Output() for _ in job.plans]
    async with Run(service, job.plans) as run:
        async for piece in run.pieces():
            outputs[piece.choice].add(piece)
    endings = {i: output.ending for i, output in enumerate(outputs) if output.ending is not None}
    return {
        **job.head.object(job.shape.whole_kind),
        "seed": job.head.seed,
        "choices": [job.shape.whole(i, output) for i, output in enumerate(outputs)],
        "usage": job.usage(sum(len(output.tokens) for output in outputs), endings),
        "metrics": _metrics(endings),
        **job.shape.extra(),
    }


async def _events(service: Service, job: Job) -> AsyncGenerator[bytes, None]:
    """The chunks of a stream, then the usage if it was asked for, then `[DONE]`."""
    shape, tokens, begun = job.shape, 0, False
    endings: dict[int, Ending] = {}
    base = job.head.object(shape.chunk_kind)
    if job.told_usage != "never":
        base["usage"] = job.usage(0, {}) if job.told_usage == "always" else None
    async with Run(service, job.plans) as run:
        async for piece in run.pieces():
            if not begun:
                begun = True
                for chunk in _openings(job, base):
                    yield event(chunk)
            tokens += len(piece.tokens)
            if job.told_usage == "always":
                base["usage"] = job.usage(tokens, endings)
            part = shape.part(piece)
            last: dict[str, object] = {}
            if piece.ending is not None:
                endings[piece.choice] = piece.ending
                if len(endings) == len(job.plans):
                    last = {"metrics": _metrics(endings)}
            if part is not None:
                yield event({**base, "choices": [part], **last})
    if job.told_usage != "never":
        totals = {"usage": job.usage(tokens, endings), "metrics": _metrics(endings)}
        yield event({**base, "choices": [], **totals})
    yield DONE


def _metrics(endings: dict[int, Ending]) -> dict[str, object]:
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
