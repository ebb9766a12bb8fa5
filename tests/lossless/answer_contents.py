"""Contents of an answer, whole or joined from its stream, in one form for each API."""

import json
from collections.abc import Iterator
from typing import Any

_VOLATILE = {
    *("id", "created", "created_at", "completed_at", "system_fingerprint", "metrics", "timings", "object"),
    *("obfuscation", "call_id", "item_id"),
}
"""Fields that may differ between two answers to one request."""


def plain(value: Any) -> Any:
    """Drop volatile fields, and round log-probabilities to three places."""
    if isinstance(value, dict):
        return {
            name: plain(each)
            for name, each in value.items()
            if name not in _VOLATILE and each not in (None, "")
        }
    if isinstance(value, list):
        return [plain(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


def events(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def contents_of_choices(text: str, stream: bool) -> Any:
    """Choices and usage of completions and chat completions."""
    if not stream:
        whole = json.loads(text)
        for choice in whole["choices"]:
            for call in choice.get("message", {}).get("tool_calls") or []:
                del call["id"]
        return plain({name: whole[name] for name in ("choices", "usage", "seed")})
    joined: dict[str, Any] = {"choices": {}}
    for event in events(text):
        joined |= {name: event[name] for name in ("usage", "seed") if event.get(name) is not None}
        for part in event["choices"]:
            _join(joined["choices"].setdefault(part["index"], {}), part)
    ordered = [choice for _, choice in sorted(joined["choices"].items())]
    return plain({**joined, "choices": ordered})


def _join(choice: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if value is None:
            continue
        if name == "delta":
            _join(choice.setdefault("message", {}), value)
        elif name == "tool_calls":
            _join_calls(choice.setdefault(name, []), value)
        elif name == "role":
            choice[name] = value
        elif isinstance(value, str) and name not in ("finish_reason", "stop_reason"):
            choice[name] = choice.get(name, "") + value
        elif isinstance(value, list):
            choice[name] = choice.get(name, []) + value
        elif isinstance(value, dict):
            _join(choice.setdefault(name, {}), value)
        else:
            choice[name] = value


def _join_calls(calls: list[dict[str, Any]], parts: list[dict[str, Any]]) -> None:
    for part in parts:
        if part["index"] == len(calls):
            calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
        for name, text in part["function"].items():
            calls[part["index"]]["function"][name] += text


def contents_of_response(text: str, stream: bool) -> Any:
    """Contents of a response; the last event of a stream has all of it."""
    return plain([*events(text)][-1]["response"] if stream else json.loads(text))


def contents_of_message(text: str, stream: bool) -> Any:
    if not stream:
        whole = json.loads(text)
        blocks = [{name: block[name] for name in block if name != "id"} for block in whole["content"]]
        ended = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        return plain({"content": blocks, **ended, "output_tokens": whole["usage"]["output_tokens"]})
    found: list[dict[str, Any]] = []
    ended = {}
    for event in events(text):
        if event["type"] == "content_block_start":
            found.append({name: value for name, value in event["content_block"].items() if name != "id"})
        elif event["type"] == "content_block_delta":
            _grow(found[event["index"]], event["delta"])
        elif event["type"] == "message_delta":
            ended = {**event["delta"], "output_tokens": event["usage"]["output_tokens"]}
    for block in found:
        if "partial" in block:
            block["input"] = json.loads(block.pop("partial") or "{}")
    return plain({"content": found, **ended})


def _grow(block: dict[str, Any], delta: dict[str, str]) -> None:
    names = {"text_delta": ("text", "text"), "thinking_delta": ("thinking", "thinking")}
    names |= {"input_json_delta": ("partial_json", "partial"), "signature_delta": ("signature", "signature")}
    given, kept = names[delta["type"]]
    block[kept] = block.get(kept, "") + delta[given]
