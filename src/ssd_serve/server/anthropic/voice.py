"""A message's object and events in Anthropic's words: blocks of thoughts, of words and of calls."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ssd_serve.server.errors import ApiError
from ssd_serve.server.openai.message_answers import Entry, TokenCount, Told
from ssd_serve.server.openai.replies import ResponseHead


class AnthropicVoice:
    """Tells one message."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._blocks: list[dict[str, Any]] = []
        self._arguments: list[str] = []
        """Of the last block, where it is a call."""
        self._open = False

    def opening(self, counted: TokenCount) -> Iterator[Told]:
        """The message has begun."""
        message = {**self._message(), "stop_reason": None, "stop_sequence": None, "usage": _usage(counted)}
        yield _event("message_start", {"message": message})

    def part(self, entry: Entry) -> Iterator[Told]:
        """More of the message."""
        delta: Mapping[str, Any] = entry["delta"]
        if delta.get("reasoning_content"):
            yield from self._text("thinking", "thinking", delta["reasoning_content"])
        if delta.get("content"):
            yield from self._text("text", "text", delta["content"])
        for call in delta.get("tool_calls", ()):
            yield from self._call(call)

    def closing(self, entry: Entry, counted: TokenCount) -> Iterator[Told]:
        """The last block's end, and why it ended."""
        yield from self._end()
        yield _event("message_delta", {"delta": _ended(entry), "usage": _usage(counted)})
        yield _event("message_stop", {})

    def whole(self, entry: Entry, counted: TokenCount) -> Mapping[str, object]:
        """All of it at once."""
        return {**self._message(), **_ended(entry), "usage": _usage(counted), "metrics": counted.metrics}

    def failed(self, error: ApiError) -> Told:
        """The stream breaks off."""
        return "error", error.body()

    def _message(self) -> dict[str, object]:
        return {
            "id": f"msg_{self._head.name}",
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": list(self._blocks),
            "seed": self._head.seed,
        }

    def _text(self, kind: str, name: str, text: str) -> Iterator[Told]:
        """More words, or thoughts."""
        if not self._open or self._blocks[-1]["type"] != kind:
            yield from self._end()
            yield self._begin({"type": kind, name: "", **({"signature": ""} if kind == "thinking" else {})})
        self._blocks[-1][name] += text
        yield self._delta({"type": f"{name}_delta", name: text})

    def _call(self, call: Mapping[str, Any]) -> Iterator[Told]:
        """A call begins, or goes on."""
        function: Mapping[str, str] = call["function"]
        if "id" in call:
            yield from self._end()
            yield self._begin({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
        if function["arguments"]:
            self._arguments.append(function["arguments"])
            yield self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})

    def _begin(self, block: dict[str, Any]) -> Told:
        self._blocks.append(block)
        self._open = True
        return _event("content_block_start", {**self._place(), "content_block": dict(block)})

    def _delta(self, delta: dict[str, object]) -> Told:
        return _event("content_block_delta", {**self._place(), "delta": delta})

    def _end(self) -> Iterator[Told]:
        """The last block is complete."""
        if not self._open:
            return
        self._open = False
        if self._blocks[-1]["type"] == "tool_use":
            self._blocks[-1]["input"] = _object("".join(self._arguments))
            self._arguments.clear()
        yield _event("content_block_stop", self._place())

    def _place(self) -> dict[str, object]:
        return {"index": len(self._blocks) - 1}


def _event(kind: str, told: Mapping[str, object]) -> Told:
    return kind, {"type": kind, **told}


def _usage(counted: TokenCount) -> dict[str, object]:
    return {
        "input_tokens": counted.prompt_tokens - counted.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counted.cached_tokens,
        "output_tokens": counted.output_tokens,
    }


def _ended(entry: Entry) -> dict[str, object]:
    cause, reason = entry.get("stop_reason"), entry.get("finish_reason")
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    found = reasons.get(str(reason), "stop_sequence" if isinstance(cause, str) else "end_turn")
    return {"stop_reason": found, "stop_sequence": cause if found == "stop_sequence" else None}


def _object(text: str) -> object:
    """The arguments of a call; what is no JSON object is told as it is."""
    try:
        found: object = json.loads(text or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": text}
