"""`/v1/responses`: OpenAI's newer API, without anything kept between requests.

Its object and events have items of reasoning, text and calls.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fastapi import Request, Response

from ssd_serve.base.messages import Ready
from ssd_serve.server.errors import ApiError
from ssd_serve.server.openai.chat import ChatEndpoint
from ssd_serve.server.openai.responses_protocol import ResponsesRequest
from ssd_serve.server.openai.serialize import ResponseHead
from ssd_serve.server.openai.stream import Entry, Event, MessageStream, handle_generation
from ssd_serve.server.openai.tasks import GenerationTask
from ssd_serve.server.service import Service

_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


@dataclass(frozen=True, slots=True)
class ResponsesEndpoint:
    """Handler of the route. Its requests become chat requests."""

    service: Service

    async def handle(self, request: Request) -> Response:
        return await handle_generation(
            self.service,
            request,
            ResponsesRequest,
            self._task,
            lambda body, head: ResponsesStream(head, body.echo()),
        )

    async def _task(self, body: ResponsesRequest, ready: Ready, request: Request) -> GenerationTask:
        return await ChatEndpoint(self.service).task(body.chat(), ready, request)


class ResponsesStream(MessageStream):
    """Writes one response. `echo` has the fields of its request that it repeats."""

    def __init__(self, head: ResponseHead, echo: Mapping[str, object]) -> None:
        super().__init__(head)
        self._echo = echo
        self._events = 0

    def opening(self) -> Iterator[Event]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, {"response": self._response("in_progress")})

    def thinking(self, text: str) -> Iterator[Event]:
        part = {"type": "reasoning_text", "text": ""}
        yield from self._begin_text("reasoning", {"summary": [], "content": []}, part)
        self.blocks[-1]["content"][0]["text"] += text
        yield self._event("response.reasoning_text.delta", {**self._part(), "delta": text})

    def text(self, text: str, entry: Entry) -> Iterator[Event]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield from self._begin_text("message", {"role": "assistant", "content": []}, part)
        scored: Sequence[object] = (entry.get("logprobs") or {}).get("content", [])
        content = self.blocks[-1]["content"][0]
        content["text"] += text
        content["logprobs"].extend(scored)
        yield self._event("response.output_text.delta", {**self._part(), "delta": text, "logprobs": scored})

    def _begin_text(
        self, kind: str, fields: Mapping[str, object], part: Mapping[str, object]
    ) -> Iterator[Event]:
        """Begin an item of text, unless the last one continues."""
        if self.is_open and self.blocks[-1]["type"] == kind:
            return
        yield from self.end_block()
        yield from self._begin(kind, fields)
        self.blocks[-1]["content"].append(dict(part))
        yield self._event("response.content_part.added", {**self._part(), "part": part})

    def begin_call(self, identifier: str, name: str) -> Iterator[Event]:
        yield from self._begin("function_call", {"call_id": identifier, "name": name, "arguments": ""})

    def arguments(self, text: str) -> Iterator[Event]:
        self.blocks[-1]["arguments"] += text
        yield self._event("response.function_call_arguments.delta", {**self._item(), "delta": text})

    def _begin(self, kind: str, fields: Mapping[str, object]) -> Iterator[Event]:
        name = f"{_PREFIXES[kind]}_{self.head.name}_{len(self.blocks)}"
        self.blocks.append({"id": name, "type": kind, "status": "in_progress", **fields})
        self.is_open = True
        yield self._event("response.output_item.added", {**self._index(), "item": dict(self.blocks[-1])})

    def end_block(self) -> Iterator[Event]:
        if not self.is_open:
            return
        self.is_open = False
        item = self.blocks[-1]
        item["status"] = "completed"
        if item["type"] == "function_call":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", {**self._item(), **fields})
        else:
            part = dict(item["content"][0])
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            scored = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
            yield self._event(f"response.{kind}.done", {**self._part(), "text": part["text"], **scored})
            yield self._event("response.content_part.done", {**self._part(), "part": part})
        yield self._event("response.output_item.done", {**self._index(), "item": dict(item)})

    def closing(self) -> Iterator[Event]:
        yield from self.end_block()
        response = self.whole()
        yield self._event(f"response.{response['status']}", {"response": response})

    def whole(self) -> Mapping[str, object]:
        cut, counts = self.last.get("finish_reason") == "length", self.counts
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {}
        return {
            **self._response("incomplete" if cut else "completed"),
            **details,
            "usage": {
                "input_tokens": counts.prompt,
                "input_tokens_details": {"cached_tokens": counts.cached},
                "output_tokens": counts.output,
                "output_tokens_details": {"reasoning_tokens": counts.thinking},
                "total_tokens": counts.prompt + counts.output,
            },
            "metrics": counts.figures,
        }

    def failed(self, error: ApiError) -> Event:
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return self._event("error", {**fields, **error.body()})

    def _response(self, status: str) -> dict[str, object]:
        return {
            "id": f"resp_{self.head.name}",
            "object": "response",
            "created_at": self.head.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.head.model,
            "output": [dict(item) for item in self.blocks],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "metadata": {},
            "seed": self.head.seed,
            "system_fingerprint": self.head.fingerprint,
            "usage": None,
            **self._echo,
        }

    def _index(self) -> dict[str, object]:
        return {"output_index": len(self.blocks) - 1}

    def _item(self) -> dict[str, object]:
        return {**self._index(), "item_id": self.blocks[-1]["id"]}

    def _part(self) -> dict[str, object]:
        return {**self._item(), "content_index": 0}

    def _event(self, kind: str, fields: Mapping[str, object]) -> Event:
        self._events += 1
        return kind, {**fields, "type": kind, "sequence_number": self._events - 1}
