"""`/v1/messages` and `/v1/messages/count_tokens`: handlers, and a message's object and events as blocks."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from ssd_serve.base.messages import Ready
from ssd_serve.server.anthropic.models import CountRequest, MessagesRequest
from ssd_serve.server.errors import ApiError
from ssd_serve.server.openai.chat import ChatEndpoint
from ssd_serve.server.openai.prompts import chat_text, text_ids
from ssd_serve.server.openai.serialize import ResponseHead
from ssd_serve.server.openai.stream import Entry, Event, MessageStream, TokenCounts, handle_generation
from ssd_serve.server.openai.tasks import GenerationTask
from ssd_serve.server.openai.unknown_fields import ignored_header
from ssd_serve.server.service import Service


@dataclass(frozen=True, slots=True)
class MessagesEndpoint:
    """Handlers of the routes. Their requests become chat requests."""

    service: Service

    async def handle(self, request: Request) -> Response:
        return await handle_generation(
            self.service,
            request,
            MessagesRequest,
            self._task,
            lambda _body, head: AnthropicStream(head),
        )

    async def count(self, request: Request) -> Response:
        ready = self.service.require_ready()
        count = await self.service.bodies.use(
            request, CountRequest, ready, lambda body: self._count(body, ready)
        )
        return JSONResponse({"input_tokens": count}, headers=ignored_header(request))

    async def _task(self, body: MessagesRequest, ready: Ready, request: Request) -> GenerationTask:
        return await ChatEndpoint(self.service).task(body.chat_request(), ready, request)

    async def _count(self, body: CountRequest, ready: Ready) -> int:
        service = self.service
        service.require_model(body.model)
        text = await chat_text(service, service.tokenize_pool, body.chat())
        steps = text_ids(service.tokenizer, ready, text, False, "messages")
        return len(await service.tokenize_pool.steps(len(text), steps))


class AnthropicStream(MessageStream):
    """Writes one message."""

    def __init__(self, head: ResponseHead) -> None:
        super().__init__(head)
        self._arguments: list[str] = []
        """Arguments of the last block, where it is a call."""

    def opening(self, counts: TokenCounts) -> Iterator[Event]:
        message = {**self._message(), "stop_reason": None, "stop_sequence": None, "usage": _usage(counts)}
        yield _event("message_start", {"message": message})

    def thinking(self, text: str) -> Iterator[Event]:
        yield from self._text("thinking", text, {"type": "thinking", "thinking": "", "signature": ""})

    def text(self, text: str, entry: Entry) -> Iterator[Event]:
        del entry
        yield from self._text("text", text, {"type": "text", "text": ""})

    def _text(self, kind: str, text: str, block: dict[str, object]) -> Iterator[Event]:
        if not self.is_open or self.blocks[-1]["type"] != kind:
            yield from self.end_block()
            yield self._begin(block)
        self.blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def begin_call(self, identifier: str, name: str) -> Iterator[Event]:
        yield self._begin({"type": "tool_use", "id": identifier, "name": name, "input": {}})

    def arguments(self, text: str) -> Iterator[Event]:
        self._arguments.append(text)
        yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _begin(self, block: dict[str, object]) -> Event:
        self.blocks.append(block)
        self.is_open = True
        return _event("content_block_start", {**self._index(), "content_block": dict(block)})

    def _delta(self, delta: dict[str, object]) -> Event:
        return _event("content_block_delta", {**self._index(), "delta": delta})

    def end_block(self) -> Iterator[Event]:
        if not self.is_open:
            return
        self.is_open = False
        if self.blocks[-1]["type"] == "tool_use":
            self.blocks[-1]["input"] = _object("".join(self._arguments))
            self._arguments.clear()
        yield _event("content_block_stop", self._index())

    def closing(self, entry: Entry, counts: TokenCounts) -> Iterator[Event]:
        yield from self.end_block()
        yield _event("message_delta", {"delta": _stop(entry), "usage": _usage(counts)})
        yield _event("message_stop", {})

    def whole(self, entry: Entry, counts: TokenCounts) -> Mapping[str, object]:
        return {**self._message(), **_stop(entry), "usage": _usage(counts), "metrics": counts.figures}

    def failed(self, error: ApiError) -> Event:
        return "error", error.body()

    def _message(self) -> dict[str, object]:
        return {
            "id": f"msg_{self.head.name}",
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": list(self.blocks),
            "seed": self.head.seed,
        }

    def _index(self) -> dict[str, object]:
        return {"index": len(self.blocks) - 1}


def _event(kind: str, fields: Mapping[str, object]) -> Event:
    return kind, {"type": kind, **fields}


def _usage(counts: TokenCounts) -> dict[str, object]:
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.output,
    }


def _stop(entry: Entry) -> dict[str, object]:
    cause, reason = entry.get("stop_reason"), entry.get("finish_reason")
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    found = reasons.get(str(reason), "stop_sequence" if isinstance(cause, str) else "end_turn")
    return {"stop_reason": found, "stop_sequence": cause if found == "stop_sequence" else None}


def _object(text: str) -> object:
    """Return the arguments of a call; a text that is no JSON object becomes its `arguments`."""
    try:
        found: object = json.loads(text or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": text}
