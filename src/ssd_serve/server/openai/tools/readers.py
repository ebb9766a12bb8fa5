"""Readers of model output: events, JSON of tool calls character by character, and thinking between marks.

A reader takes text in parts of any size and returns the events that are certain. However a text is cut, the
events say the same: the number of tokens that speculation accepts at once must not matter.
"""

import json
from dataclasses import dataclass
from typing import Protocol

from ssd_serve.sampling.thinking import BEGIN, END

_SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Start of a tool call; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More JSON text of the arguments of the last call."""

    text: str


Event = Text | Thinking | CallStart | CallArguments


class OutputReader(Protocol):
    """Reads one output from its beginning to its end."""

    def push(self, text: str) -> list[Event]:
        """Return the events that are certain with this text."""
        ...

    def finish(self) -> list[Event]:
        """Return the rest at the end of the output: an incomplete marker is text."""
        ...


def certain(text: str, marker: str) -> str:
    """Return the part of a text that no continuation can change: without the start of a marker and the white
    space before it."""
    longest = min(len(text), len(marker) - 1)
    begun = next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
    return text[: len(text) - begun].rstrip()


class JsonValueEnd:
    """Finds the end of a JSON value. Objects, lists and strings end with a character of their own; other
    values end before the next comma or bracket, and set `is_plain`."""

    def __init__(self) -> None:
        self.is_plain = False
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def take(self, character: str) -> bool:
        """Return True where the value ends with this character."""
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._quoted = False
                return self._depth == 0
            return False
        if character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        elif self._depth == 0:
            self.is_plain = True
        return False


class CallReader:
    """Reads `{"name": ..., "arguments": {...}}`; `parameters` is an alias, and the keys may come in any order.

    Arguments are passed on as text and not parsed. There are no events until `name` is known; `done` is True
    once the object has ended.
    """

    def __init__(self) -> None:
        self.done = False
        self.name: str | None = None
        self._raw: list[str] = []
        self._key: str | None = None
        self._member: list[str] = []
        self._value: JsonValueEnd | None = None
        self._begun = False
        self._early_arguments = ""
        """Arguments that came before the name."""
        self._has_arguments = False

    @property
    def raw(self) -> str:
        """The text before the name was known."""
        return "".join(self._raw)

    def take(self, character: str) -> list[Event]:
        if self.name is None:
            self._raw.append(character)
        if not self._begun:
            self._begun = character == "{"
            return []
        if self._value is not None:
            return self._in_value(self._value, character)
        if character == "}" and not self._member:
            return self._end()
        if character in _SPACE or (character == "," and not self._member):
            return []
        self._member.append(character)
        if character == ":":
            self._key = _string("".join(self._member[:-1]))
            self._member, self._value = [], JsonValueEnd()
        return []

    def _in_value(self, value: JsonValueEnd, character: str) -> list[Event]:
        if not self._member and character in _SPACE:
            return []
        if value.is_plain and character in ",}":
            return self._end_member() + (self._end() if character == "}" else [])
        self._member.append(character)
        over = value.take(character)
        found: list[Event] = []
        if self._key in _ARGUMENT_KEYS and self._member[0] == "{":
            found = self._arguments(character)
        return found + (self._end_member() if over else [])

    def _end_member(self) -> list[Event]:
        text, key = "".join(self._member).rstrip(), self._key
        self._member, self._value, self._key = [], None, None
        if key == "name":
            self.name = _string(text)
            if self.name is None:
                return []
            early, self._early_arguments = self._early_arguments, ""
            return [CallStart(self.name), *([CallArguments(early)] if early else [])]
        if key in _ARGUMENT_KEYS and not text.startswith("{"):
            inner = _string(text)  # some models write the JSON text as a string
            return self._arguments(text if inner is None else inner)
        return []

    def _arguments(self, text: str) -> list[Event]:
        self._has_arguments = True
        if self.name is None:
            self._early_arguments += text
            return []
        return [CallArguments(text)]

    def _end(self) -> list[Event]:
        self.done = True
        return [] if self.name is None or self._has_arguments else [CallArguments("{}")]


def _string(text: str) -> str | None:
    """Parse a JSON string; None for anything else."""
    try:
        found: object = json.loads(text, strict=False)
    except ValueError:
        return None
    return found if isinstance(found, str) else None


class ThinkingReader:
    """Separates thinking from text: `<think> ... </think>`, as Qwen 3 and DeepSeek write it.

    Thinking comes first or not at all; white space around it is dropped. `thinking`: the output begins inside
    the marks, since the prompt ends with the first one.
    """

    def __init__(self, thinking: bool) -> None:
        self._thinking = thinking
        self._may_think = not thinking
        self._only_space = True
        """True while the current part has only white space."""
        self._held = ""

    def push(self, text: str) -> list[Event]:
        self._held += text
        found: list[Event] = []
        if self._may_think:
            begun = self._held.lstrip()
            if BEGIN.startswith(begun[: len(BEGIN)]) and len(begun) < len(BEGIN):
                return []
            self._may_think = False
            if begun.startswith(BEGIN):
                self._held, self._thinking = begun[len(BEGIN) :], True
            else:
                self._only_space = False
        if self._thinking:
            thought, mark, rest = self._held.partition(END)
            if not mark:
                sure = certain(thought, END)
                self._held = thought[len(sure) :]
                return found + self._thought(sure)
            found += self._thought(thought.rstrip())
            self._held, self._thinking, self._only_space = rest, False, True
        return [*found, *self._text()]

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._thinking:
            return self._thought(held.rstrip())
        return [Text(held)] if held else []

    def _thought(self, text: str) -> list[Event]:
        text = text.lstrip() if self._only_space else text
        self._only_space = self._only_space and not text
        return [Thinking(text)] if text else []

    def _text(self) -> list[Event]:
        text, self._held = self._held, ""
        if self._only_space:
            text = text.lstrip()
            self._only_space = not text
        return [Text(text)] if text else []
