"""Readers of model output: thinking between marks, and tool calls as Hermes and Qwen, Llama 3 and Mistral write them.

A reader takes text in parts of any size and returns the events that are certain. However a text is cut, the
events say the same: the number of tokens that speculation accepts at once must not matter. A text that only
looks like a call is text, all of it. Knows markers and names of tools, no schemas.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from ssd_serve.sampling.thinking import BEGIN, END

_SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")

Result = TypeVar("Result")
Reading = Generator[None, None, Result]
"""A part of a reader; it yields where it needs more text."""


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


class _EndOfOutput(Exception):  # noqa: N818
    pass


class OutputReader(ABC):
    """Reads one output from its beginning to its end. `tools` are the names that can be called."""

    checks_names: ClassVar[bool] = False
    """True where a call of an unknown tool is text."""

    def __init__(self, tools: Collection[str] = ()) -> None:
        self._tools = tools
        self._held = ""
        self._place = 0
        """Number of characters of `_held` that were read."""
        self._over = False
        self._events: list[Event] = []
        self._strips = False
        """White space at the beginning of the next text is dropped."""
        self._undecided = ""
        """Text that was read and is passed on if it turns out to be no call."""
        self._name: str | None = None
        self._early_arguments = ""
        """Arguments that came before the name."""
        self._has_arguments = False
        self._running = self._run()

    def push(self, text: str) -> list[Event]:
        """Return the events that are certain with this text."""
        self._held, self._place = self._held[self._place :] + text, 0
        next(self._running, None)
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """Return the rest at the end of the output: an incomplete marker is text."""
        self._over = True
        return self.push("")

    @abstractmethod
    def _read(self) -> Reading[None]: ...

    def _run(self) -> Reading[None]:
        try:
            yield from self._read()
        except _EndOfOutput:
            self._pass_on(self._undecided + self._held[self._place :])

    def _more(self) -> Reading[None]:
        if self._over:
            raise _EndOfOutput
        yield

    def _peek(self, skipped: str = "") -> Reading[str]:
        """Return the next character that is not one of `skipped`, without taking it."""
        while True:
            if self._place == len(self._held):
                yield from self._more()
            elif self._held[self._place] in skipped:
                self._place += 1
            else:
                return self._held[self._place]

    def _take(self) -> str:
        """Return the next character; `_peek` or a check of the place comes before."""
        character = self._held[self._place]
        self._place += 1
        if self._name is None:
            self._undecided += character
        return character

    def _pass_on(self, text: str, kind: type[Text] | type[Thinking] = Text) -> None:
        if self._strips:
            text = text.lstrip()
            self._strips = not text
        if text:
            self._events.append(kind(text))

    def _pass_rest(self) -> Reading[None]:
        while True:
            self._pass_on(self._held[self._place :])
            self._place = len(self._held)
            yield from self._more()

    def _pass_until(self, mark: str, kind: type[Text] | type[Thinking] | None = Text) -> Reading[None]:
        """Pass on the text before a mark, without the white space before it; without a kind, drop the text."""
        found = -1
        while found < 0:
            found, rest = self._held.find(mark, self._place), self._held[self._place :]
            if found >= 0:
                sure = rest[: found - self._place].rstrip()
                self._place = found + len(mark)
            else:
                sure = rest if self._over else _certain(rest, mark)
                self._place += len(sure)
                sure = sure.rstrip() if kind is Thinking else sure
            if kind is not None:
                self._pass_on(sure, kind)
            if found < 0:
                yield from self._more()

    def _call(self) -> Reading[bool]:
        """Read `{"name": ..., "arguments": {...}}`, with keys in any order; `parameters` is an alias.

        Arguments are passed on as text and not parsed. Return False where the object is no call: `_undecided`
        has its text then.
        """
        self._name, self._early_arguments, self._has_arguments = None, "", False
        while (yield from self._peek()) != "{":
            self._take()
        self._take()
        while (key := (yield from self._key())) is not None:
            value = yield from self._value(key in _ARGUMENT_KEYS)
            if key == "name":
                self._name = _string(value)
                if self._name is not None:
                    if self.checks_names and self._name not in self._tools:
                        return False
                    self._start_call(self._name)
            elif key in _ARGUMENT_KEYS and not value.startswith("{"):
                inner = _string(value)  # some models write the JSON text as a string
                self._pass_arguments(value if inner is None else inner)
        if self._name is not None and not self._has_arguments:
            self._events.append(CallArguments("{}"))
        return self._name is not None

    def _start_call(self, name: str) -> None:
        self._undecided, self._name = "", name
        self._events.append(CallStart(name))
        if self._early_arguments:
            self._events.append(CallArguments(self._early_arguments))
            self._early_arguments = ""

    def _pass_arguments(self, text: str) -> None:
        self._has_arguments = True
        if self._name is None:
            self._early_arguments += text
        else:
            self._events.append(CallArguments(text))

    def _key(self) -> Reading[str | None]:
        """Read the next key with its colon; None at the end of the object."""
        text = ""
        while not text.endswith(":"):
            yield from self._peek()
            character = self._take()
            if character == "}" and not text:
                return None
            if character not in _SPACE and (text or character != ","):
                text += character
        return _string(text[:-1]) or ""

    def _value(self, are_arguments: bool) -> Reading[str]:
        """Read a JSON value. Objects, lists and strings end with a character of their own; other values end
        before a comma or bracket. Arguments are passed on, if they are an object."""
        text, depth, quoted, escaped, plain, over = list[str](), 0, False, False, False, False
        while not over:
            if self._place == len(self._held):
                yield from self._more()
                continue
            if plain and self._held[self._place] in ",}":
                break
            character = self._take()
            if not text and character in _SPACE:
                continue
            text.append(character)
            if quoted:
                over = character == '"' and not escaped and depth == 0
                quoted = character != '"' or escaped
                escaped = character == "\\" and not escaped
            elif character == '"':
                quoted = True
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
                over = depth == 0
            elif depth == 0:
                plain = True
            if are_arguments and text[0] == "{":
                self._pass_arguments(character)
        return "".join(text).rstrip()


class HermesReader(OutputReader):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one or several, perhaps behind text."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def _read(self) -> Reading[None]:
        while True:
            yield from self._pass_until(self._OPEN)
            self._undecided = self._OPEN
            if (yield from self._call()):
                yield from self._pass_until(self._CLOSE, None)
                self._strips = True
            else:
                self._pass_on(self._undecided)
                self._undecided = ""


class LlamaReader(OutputReader):
    """`{"name": ..., "parameters": {...}}` alone, several with semicolons, perhaps behind a tag; JSON that
    names no tool is text."""

    _TAG = "<|python_tag|>"
    checks_names = True

    def _read(self) -> Reading[None]:
        while True:
            begun = self._held.lstrip()
            calls = begun.removeprefix(self._TAG).lstrip()
            if calls and not self._TAG.startswith(begun):
                break
            yield from self._more()
        if calls.startswith("{"):
            self._place = len(self._held) - len(calls)
            while (yield from self._peek(f"{_SPACE};,")) == "{" and (yield from self._call()):
                pass
            self._pass_on(self._undecided)
            self._undecided = ""
        yield from self._pass_rest()


class MistralReader(OutputReader):
    """`[TOOL_CALLS]` and a list of calls, or before each call, as `name{...}` or `name[ARGS]{...}`."""

    _MARK, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

    def _read(self) -> Reading[None]:
        while True:
            yield from self._pass_until(self._MARK)
            if (yield from self._peek(_SPACE)) in "[{":  # a model may forget the bracket
                yield from self._list()
            else:
                self._undecided = self._MARK
                while (place := self._held.find("{", self._place)) < 0:
                    yield from self._more()
                name = self._held[self._place : place].partition(self._ID)[0].partition(self._ARGS)[0]
                self._place = place
                self._start_call(name.strip())
                yield from self._value(are_arguments=True)
            self._strips = True

    def _list(self) -> Reading[None]:
        start = f"{self._MARK}["
        self._place += (yield from self._peek()) == "["
        while (character := (yield from self._peek())) != "]":
            if character == "{":
                self._undecided = start
                if not (yield from self._call()):
                    self._pass_on(self._undecided.removeprefix(start))
                self._undecided = ""
            else:
                self._place += 1
        self._place += 1


class ThinkingReader(OutputReader):
    """Separates thinking from text: `<think> ... </think>`, as Qwen 3 and DeepSeek write it.

    Thinking comes first or not at all; white space around it is dropped. `thinking`: the output begins inside
    the marks, since the prompt ends with the first one.
    """

    def __init__(self, thinking: bool) -> None:
        super().__init__()
        self._thinking = thinking

    def _read(self) -> Reading[None]:
        if not self._thinking:
            while (begun := self._held.lstrip()) != BEGIN and BEGIN.startswith(begun):
                yield from self._more()
            if not begun.startswith(BEGIN):
                yield from self._pass_rest()
            self._place = len(self._held) - len(begun) + len(BEGIN)
        self._strips = True
        yield from self._pass_until(END, Thinking)
        self._strips = True
        yield from self._pass_rest()


def _certain(text: str, marker: str) -> str:
    """Return the part of a text that no continuation can change: without the start of a marker and the white
    space before it."""
    longest = min(len(text), len(marker) - 1)
    begun = next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
    return text[: len(text) - begun].rstrip()


def _string(text: str) -> str | None:
    """Parse a JSON string; None for anything else."""
    try:
        found: object = json.loads(text, strict=False)
    except ValueError:
        return None
    return found if isinstance(found, str) else None


FORMATS: dict[str, type[OutputReader]] = {
    "hermes": HermesReader,
    "llama3": LlamaReader,
    "mistral": MistralReader,
}
"""Readers by the values of `SSD_TOOL_PARSER`."""

_TEMPLATE_MARKS = (("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes"), ("<|python_tag|>", "llama3"))


def format_of(template: str) -> str | None:
    """Return the call format that a chat template teaches the model; None where it is unknown."""
    if '"parameters"' in template and "<|start_header_id|>" in template:
        return "llama3"
    return next((name for mark, name in _TEMPLATE_MARKS if mark in template), None)
