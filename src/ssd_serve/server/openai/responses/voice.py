"""A response's object and events: items of thoughts, of words and of calls, each told from its beginning to
its end."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ssd_serve.server.errors import ApiError
from ssd_serve.server.openai.message_answers import Entry, TokenCount, Told
from ssd_serve.server.openai.replies import ResponseHead

_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


class ResponseVoice:
    """Tells one response. `echo` is what it repeats of its request."""

    def __init__(self, head: ResponseHead, echo: Mapping[str, object]) -> None:
        self._head = head
        self._echo = echo
        self._items: list[dict[str, Any]] = []
        self._open = False
        """Whether the last item goes on."""
        self._events = 0

    def opening(self, counted: TokenCount) -> Iterator[Told]:
        """The response has begun."""
        del counted
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, {"response": self._response("in_progress")})

    def part(self, entry: Entry) -> Iterator[Told]:
        """More of the message."""
        delta: Mapping[str, Any] = entry["delta"]
        if delta.get("reasoning_content"):
            yield from self._text("reasoning", delta["reasoning_content"], [])
        if delta.get("content"):
            scored: Sequence[object] = (entry.get("logprobs") or {}).get("content", [])
            yield from self._text("message", delta["content"], scored)
        for call in delta.get("tool_calls", ()):
            yield from self._call(call)

    def closing(self, entry: Entry, counted: TokenCount) -> Iterator[Told]:
        """The last item's end, and all of it."""
        yield from self._end()
        response = self._finished(entry, counted)
        yield self._event(f"response.{response['status']}", {"response": response})

    def whole(self, entry: Entry, counted: TokenCount) -> Mapping[str, object]:
        """All of it at once."""
        return self._finished(entry, counted)

    def failed(self, error: ApiError) -> Told:
        """The stream breaks off."""
        told = {"code": error.code, "message": error.message, "param": error.param}
        return self._event("error", {**told, **error.body()})

    def _finished(self, entry: Entry, counted: TokenCount) -> dict[str, object]:
        cut = entry.get("finish_reason") == "length"
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {}
        return {
            **self._response("incomplete" if cut else "completed"),
            **details,
            "usage": {
                "input_tokens": counted.prompt_tokens,
                "input_tokens_details": {"cached_tokens": counted.cached_tokens},
                "output_tokens": counted.output_tokens,
                "output_tokens_details": {"reasoning_tokens": counted.thought_tokens},
                "total_tokens": counted.prompt_tokens + counted.output_tokens,
            },
            "metrics": counted.metrics,
        }

    def _response(self, status: str) -> dict[str, object]:
        return {
            "id": f"resp_{self._head.name}",
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._head.model,
            "output": [dict(item) for item in self._items],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "metadata": {},
            "seed": self._head.seed,
            "system_fingerprint": self._head.fingerprint,
            "usage": None,
            **self._echo,
        }

    def _text(self, kind: str, text: str, scored: Sequence[object]) -> Iterator[Told]:
        """More words, or thoughts."""
        if not self._open or self._items[-1]["type"] != kind:
            yield from self._end()
            own: dict[str, object] = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._begin(kind, {**own, "content": []})
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            if kind == "reasoning":
                part = {"type": "reasoning_text", "text": ""}
            self._items[-1]["content"].append(part)
            yield self._event("response.content_part.added", {**self._place(), "part": dict(part)})
        part = self._items[-1]["content"][0]
        part["text"] += text
        if kind == "message":
            part["logprobs"].extend(scored)
            yield self._event(
                "response.output_text.delta", {**self._place(), "delta": text, "logprobs": scored}
            )
        else:
            yield self._event("response.reasoning_text.delta", {**self._place(), "delta": text})

    def _call(self, call: Mapping[str, Any]) -> Iterator[Told]:
        """A call begins, or goes on."""
        function: Mapping[str, str] = call["function"]
        if "id" in call:
            yield from self._end()
            yield from self._begin(
                "function_call", {"call_id": call["id"], "name": function["name"], "arguments": ""}
            )
        more = function["arguments"]
        if more:
            self._items[-1]["arguments"] += more
            yield self._event(
                "response.function_call_arguments.delta", {**self._place(part=False), "delta": more}
            )

    def _begin(self, kind: str, fields: Mapping[str, object]) -> Iterator[Told]:
        name = f"{_PREFIXES[kind]}_{self._head.name}_{len(self._items)}"
        self._items.append({"id": name, "type": kind, "status": "in_progress", **fields})
        self._open = True
        yield self._event("response.output_item.added", {**self._item(), "item": dict(self._items[-1])})

    def _end(self) -> Iterator[Told]:
        """The last item is complete."""
        if not self._open:
            return
        self._open = False
        item = self._items[-1]
        item["status"] = "completed"
        if item["type"] == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", {**self._place(part=False), **told})
        else:
            part = dict(item["content"][0])
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            scored = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
            yield self._event(f"response.{kind}.done", {**self._place(), "text": part["text"], **scored})
            yield self._event("response.content_part.done", {**self._place(), "part": part})
        yield self._event("response.output_item.done", {**self._item(), "item": dict(item)})

    def _item(self) -> dict[str, object]:
        return {"output_index": len(self._items) - 1}

    def _place(self, part: bool = True) -> dict[str, object]:
        place = {**self._item(), "item_id": self._items[-1]["id"]}
        return {**place, "content_index": 0} if part else place

    def _event(self, kind: str, told: Mapping[str, object]) -> Told:
        self._events += 1
        return kind, {**told, "type": kind, "sequence_number": self._events - 1}
