"""The message of a response, read from output text: thinking, text and tool calls, whole or as deltas.

Knows the shape of OpenAI's messages and deltas; no tokens, and not how choices end.
"""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import cast

import msgspec

from ssd_serve.server.openai.output_readers import (
    FORMATS,
    CallStart,
    Event,
    OutputReader,
    Text,
    Thinking,
    ThinkingReader,
)

_ID_CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 9
"""Mistral's templates take ids of exactly so many letters and digits."""


@dataclass(frozen=True, slots=True)
class MessageRules:
    """Contents to look for in an output. `format` None: no calls; `thinking` None: no thinking."""

    format: str | None = None
    tools: Collection[str] = ()
    parallel: bool = True
    thinking: bool | None = None
    """True where the output begins inside thinking."""
    include_thinking: bool = True

    def reader(self) -> "MessageReader":
        """Return a reader of one output."""
        thinking = None if self.thinking is None else ThinkingReader(self.thinking)
        calls = None if self.format is None else FORMATS[self.format](self.tools)
        return MessageReader(thinking, calls, self.parallel)


class MessageReader:
    """Reads one output: thinking first, then text and calls; only the first call where not `parallel`."""

    def __init__(self, thinking: OutputReader | None, calls: OutputReader | None, parallel: bool) -> None:
        self._thinking = thinking
        self._calls = calls
        self._parallel = parallel
        self._count = 0

    def push(self, text: str) -> list[Event]:
        if self._thinking is None:
            return self._read_calls([Text(text)] if text else [])
        return self._read_calls(self._thinking.push(text))

    def finish(self) -> list[Event]:
        found = self._read_calls(self._thinking.finish()) if self._thinking is not None else []
        return found + (self._limit(self._calls.finish()) if self._calls is not None else [])

    def _read_calls(self, events: Iterable[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            if isinstance(event, Text) and self._calls is not None:
                found += self._limit(self._calls.push(event.text))
            else:
                found.append(event)
        return found

    def _limit(self, events: Iterable[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            self._count += isinstance(event, CallStart)
            if self._parallel or self._count < 2 or isinstance(event, Text):
                found.append(event)
        return found


@dataclass(slots=True)
class Call:
    """A tool call, as far as it was generated."""

    identifier: str
    name: str
    arguments: list[str] = field(default_factory=list[str])

    def entry(self) -> dict[str, object]:
        """Return the call as messages have it."""
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.identifier, "type": "function", "function": function}


def arguments_object(text: str) -> dict[str, object]:
    """Return the arguments of a call as an object. A text that is no JSON object, since the output was cut or
    the model erred, becomes its field `arguments`."""
    try:
        found: object = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        found = None
    return cast("dict[str, object]", found) if isinstance(found, dict) else {"arguments": text}


class MessageWriter:
    """Writes the message of one choice, as deltas and as a whole. `seed` makes the ids of its calls."""

    def __init__(self, rules: MessageRules, seed: str) -> None:
        self._reader = rules.reader()
        self._include_thinking = rules.include_thinking
        self._seed = seed
        self._texts: list[str] = []
        self._thinking: list[str] = []
        self._calls: list[Call] = []

    @property
    def called(self) -> bool:
        """True where a tool was called."""
        return bool(self._calls)

    def skip(self, text: str) -> None:
        """Read text that the client has already. Only calls in it are repeated in the message."""
        if text:
            self.push(text)
            self._texts.clear()
            self._thinking.clear()

    def push(self, text: str, last: bool = False) -> dict[str, object]:
        """Return the delta of more text; empty where nothing is certain yet. `last` ends the output."""
        events = self._reader.push(text)
        return self._delta([*events, *self._reader.finish()] if last else events)

    def message(self) -> dict[str, object]:
        """Return the whole message. Its content is null where tools were called without text."""
        text = "".join(self._texts)
        message: dict[str, object] = {
            "role": "assistant",
            "content": text if text or not self._calls else None,
            "refusal": None,
        }
        if self._thinking:
            message["reasoning_content"] = "".join(self._thinking)
        if self._calls:
            message["tool_calls"] = [call.entry() for call in self._calls]
        return message

    def _delta(self, events: Iterable[Event]) -> dict[str, object]:
        known = len(self._calls)
        texts: list[str] = []
        thinking: list[str] = []
        arguments: dict[int, list[str]] = {}
        """New arguments, by index of the call."""
        for event in events:
            if isinstance(event, Text):
                texts.append(event.text)
            elif isinstance(event, Thinking):
                thinking += [event.text] * self._include_thinking
            elif isinstance(event, CallStart):
                arguments[len(self._calls)] = []
                self._calls.append(Call(_call_id(self._seed, len(self._calls)), event.name))
            else:
                self._calls[-1].arguments.append(event.text)
                arguments.setdefault(len(self._calls) - 1, []).append(event.text)
        self._texts += texts
        self._thinking += thinking
        found: dict[str, object] = {}
        if texts:
            found["content"] = "".join(texts)
        if thinking:
            found["reasoning_content"] = "".join(thinking)
        if arguments:
            found["tool_calls"] = [
                {"index": index, **self._calls[index].entry()}
                if index >= known
                else {"index": index, "function": {"arguments": "".join(more)}}
                for index, more in arguments.items()
            ]
        return found


def _call_id(seed: str, index: int) -> str:
    """Return letters and digits that are unique to this call."""
    number = int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest())
    characters: list[str] = []
    for _ in range(_ID_LENGTH):
        number, index = divmod(number, len(_ID_CHARACTERS))
        characters.append(_ID_CHARACTERS[index])
    return "".join(characters)
