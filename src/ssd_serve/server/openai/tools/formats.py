"""Formats of tool calls: Hermes and Qwen, Llama 3, Mistral. Each is a reader of one output.

A text that only looks like a call is text, all of it. Knows markers and names of tools, no schemas.
"""

from collections.abc import Callable, Collection

from ssd_serve.server.openai.tools.readers import (
    CallArguments,
    CallReader,
    CallStart,
    Event,
    JsonValueEnd,
    OutputReader,
    Text,
    certain,
)

_SPACE = " \t\r\n"


class _TextBesideCalls:
    """Text between calls: white space behind a call is dropped."""

    def __init__(self) -> None:
        self._called = False

    def end_call(self) -> None:
        self._called = True

    def push(self, text: str) -> list[Event]:
        if self._called:
            text = text.lstrip()
            self._called = not text
        return [Text(text)] if text else []


class HermesReader:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one or several, perhaps behind text."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, tools: Collection[str]) -> None:
        del tools  # the marker suffices
        self._held = ""
        self._call: CallReader | None = None
        self._text = _TextBesideCalls()

    def push(self, text: str) -> list[Event]:
        found: list[Event] = []
        self._held += text
        while True:
            if self._call is None:
                before, mark, rest = self._held.partition(self._OPEN)
                if not mark:
                    sure = certain(before, self._OPEN)
                    self._held = before[len(sure) :]
                    return found + self._text.push(sure)
                found += self._text.push(before.rstrip())
                self._held, self._call = rest, CallReader()
            found += self._read(self._call)
            if not self._call.done:
                return found
            if self._call.name is None:
                found += self._text.push(self._OPEN + self._call.raw)
                self._call = None
                continue
            before, mark, rest = self._held.partition(self._CLOSE)
            if not mark:
                self._held = before[len(certain(before, self._CLOSE)) :]
                return found
            self._held, self._call = rest, None
            self._text.end_call()

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._call is None:
            return self._text.push(held)
        if self._call.name is None:
            return [Text(self._OPEN + self._call.raw + held)]
        return []

    def _read(self, call: CallReader) -> list[Event]:
        found: list[Event] = []
        place = 0
        while place < len(self._held) and not call.done:
            found += call.take(self._held[place])
            place += 1
        self._held = self._held[place:]
        return found


class LlamaReader:
    """`{"name": ..., "parameters": {...}}` alone, several with semicolons, perhaps behind a tag; JSON that
    names no tool is text."""

    _TAG = "<|python_tag|>"

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = tools
        self._beginning: str | None = ""
        """The text so far, until it is certain whether calls come."""
        self._call: CallReader | None = None
        self._is_text = False

    def push(self, text: str) -> list[Event]:
        found: list[Event] = []
        if self._beginning is not None:
            self._beginning += text
            begun = self._beginning.lstrip()
            if self._TAG.startswith(begun[: len(self._TAG)]) and len(begun) < len(self._TAG):
                return []
            text = begun.removeprefix(self._TAG)
            if not text.lstrip():
                return []
            if not text.lstrip().startswith("{"):
                self._is_text, text = True, self._beginning
            self._beginning = None
        if self._is_text:
            return [Text(text)] if text else []
        for place, character in enumerate(text):
            found += self._take(character)
            if self._is_text:
                rest = text[place + 1 :]
                return found + ([Text(rest)] if rest else [])
        return found

    def finish(self) -> list[Event]:
        if self._beginning is not None:
            return [Text(self._beginning)] if self._beginning else []
        if self._call is not None and not self._named(self._call):
            return [Text(self._call.raw)]
        return []

    def _take(self, character: str) -> list[Event]:
        if self._call is None:
            if character in _SPACE or character in ";,":
                return []
            if character != "{":
                self._is_text = True
                return [Text(character)]
            self._call = CallReader()
        call = self._call
        found = call.take(character)
        if call.name is not None and call.name not in self._tools:
            found = self._refused(call)
        elif call.done:
            found = found if self._named(call) else self._refused(call)
            self._call = None
        return found

    def _refused(self, call: CallReader) -> list[Event]:
        self._is_text, self._call = True, None
        return [Text(call.raw)]

    def _named(self, call: CallReader) -> bool:
        return call.name in self._tools


class MistralReader:
    """`[TOOL_CALLS]` and a list of calls, or before each call, as `name{...}` or `name[ARGS]{...}`."""

    _MARK, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

    def __init__(self, tools: Collection[str]) -> None:
        del tools
        self._held = ""
        self._listed: CallReader | None = None
        self._in_list = False
        self._value: JsonValueEnd | None = None
        self._inside = False
        self._text = _TextBesideCalls()

    def push(self, text: str) -> list[Event]:
        self._held += text
        found: list[Event] = []
        while True:
            before = self._held
            found += self._step()
            if self._held == before or not self._held:
                return found

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if not self._inside:
            return self._text.push(held)
        if self._listed is not None and self._listed.name is None and self._listed.raw:
            return [Text(self._MARK + "[" + self._listed.raw)]
        if self._value is None and not self._in_list and held.strip():
            return [Text(self._MARK + held)]
        return []

    def _step(self) -> list[Event]:
        if not self._inside:
            return self._outside()
        if self._value is not None:
            return self._arguments(self._value)
        if self._in_list:
            return self._list()
        self._held = self._held.lstrip()
        if self._held.startswith(("[", "{")):  # a model may forget the bracket
            self._in_list, self._held = True, self._held.removeprefix("[")
            return self._list()
        return self._name()

    def _outside(self) -> list[Event]:
        before, mark, rest = self._held.partition(self._MARK)
        if not mark:
            sure = certain(before, self._MARK)
            self._held = before[len(sure) :]
            return self._text.push(sure)
        self._inside, self._held = True, rest
        return self._text.push(before.rstrip())

    def _list(self) -> list[Event]:
        found: list[Event] = []
        for place, character in enumerate(self._held):
            if self._listed is None:
                if character == "]":
                    self._in_list = False
                    self._end(place + 1)
                    return found
                if character != "{":
                    continue
                self._listed = CallReader()
            found += self._listed.take(character)
            if self._listed.done:
                found += self._text.push(self._listed.raw) if self._listed.name is None else []
                self._listed = None
        self._held = ""
        return found

    def _name(self) -> list[Event]:
        name, brace, rest = self._held.partition("{")
        if not brace:
            return []
        name = name.partition(self._ID)[0].partition(self._ARGS)[0].strip()
        self._held, self._value = "{" + rest, JsonValueEnd()
        return [CallStart(name)]

    def _arguments(self, value: JsonValueEnd) -> list[Event]:
        for place, character in enumerate(self._held):
            if value.take(character):
                text, self._value = self._held[: place + 1], None
                self._end(place + 1)
                return [CallArguments(text)]
        text, self._held = self._held, ""
        return [CallArguments(text)] if text else []

    def _end(self, place: int) -> None:
        self._held, self._inside = self._held[place:], False
        self._text.end_call()


FORMATS: dict[str, Callable[[Collection[str]], OutputReader]] = {
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
