"""How models write calls of tools: Hermes and Qwen, Llama 3, Mistral.

Each format is a reader of one output. A text that only looks like a call is words, all of it. Knows markers
and what stands between them, not the tools themselves but by name.
"""

from collections.abc import Callable, Collection

from ssd_serve.server.openai.tools.call_reader import CallReader, ValueEnd
from ssd_serve.server.openai.tools.events import Arguments, CallBegun, Event, OutputReader, Words, certain

_SPACE = " \t\r\n"


class _Speech:
    """Words beside calls: white space behind a call says nothing."""

    def __init__(self) -> None:
        self._called = False

    def call(self) -> None:
        """A call has ended."""
        self._called = True

    def tell(self, text: str) -> list[Event]:
        """These words."""
        if self._called:
            text = text.lstrip()
            self._called = not text
        return [Words(text)] if text else []


class HermesReader:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several of them, behind words or not."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, tools: Collection[str]) -> None:
        del tools  # the marker is clear enough
        self._held = ""
        self._call: CallReader | None = None
        self._speech = _Speech()

    def push(self, text: str) -> list[Event]:
        """See `OutputReader`."""
        found: list[Event] = []
        self._held += text
        while True:
            if self._call is None:
                before, mark, rest = self._held.partition(self._OPEN)
                if not mark:
                    sure = certain(before, self._OPEN)
                    self._held = before[len(sure) :]
                    return found + self._speech.tell(sure)
                found += self._speech.tell(before.rstrip())
                self._held, self._call = rest, CallReader()
            found += self._read(self._call)
            if not self._call.done:
                return found
            if self._call.name is None:
                found += self._speech.tell(self._OPEN + self._call.raw)
                self._call = None
                continue
            before, mark, rest = self._held.partition(self._CLOSE)
            if not mark:
                self._held = before[len(certain(before, self._CLOSE)) :]
                return found
            self._held, self._call = rest, None
            self._speech.call()

    def finish(self) -> list[Event]:
        """See `OutputReader`."""
        held, self._held = self._held, ""
        if self._call is None:
            return self._speech.tell(held)
        if self._call.name is None:
            return [Words(self._OPEN + self._call.raw + held)]
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
    """`{"name": ..., "parameters": {...}}` and nothing else, several with semicolons, behind a tag or not;
    JSON that names no tool is words."""

    _TAG = "<|python_tag|>"

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = tools
        self._beginning: str | None = ""
        """What came before it was clear whether calls come."""
        self._call: CallReader | None = None
        self._wordy = False

    def push(self, text: str) -> list[Event]:
        """See `OutputReader`."""
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
                self._wordy, text = True, self._beginning
            self._beginning = None
        if self._wordy:
            return [Words(text)] if text else []
        for place, character in enumerate(text):
            found += self._take(character)
            if self._wordy:
                rest = text[place + 1 :]
                return found + ([Words(rest)] if rest else [])
        return found

    def finish(self) -> list[Event]:
        """See `OutputReader`."""
        if self._beginning is not None:
            return [Words(self._beginning)] if self._beginning else []
        if self._call is not None and not self._named(self._call):
            return [Words(self._call.raw)]
        return []

    def _take(self, character: str) -> list[Event]:
        if self._call is None:
            if character in _SPACE or character in ";,":
                return []
            if character != "{":
                self._wordy = True
                return [Words(character)]
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
        self._wordy, self._call = True, None
        return [Words(call.raw)]

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
        self._value: ValueEnd | None = None
        self._inside = False
        self._speech = _Speech()

    def push(self, text: str) -> list[Event]:
        """See `OutputReader`."""
        self._held += text
        found: list[Event] = []
        while True:
            before = self._held
            found += self._step()
            if self._held == before or not self._held:
                return found

    def finish(self) -> list[Event]:
        """See `OutputReader`."""
        held, self._held = self._held, ""
        if not self._inside:
            return self._speech.tell(held)
        if self._listed is not None and self._listed.name is None and self._listed.raw:
            return [Words(self._MARK + "[" + self._listed.raw)]
        if self._value is None and not self._in_list and held.strip():
            return [Words(self._MARK + held)]
        return []

    def _step(self) -> list[Event]:
        """Read as much of what is held as one state can."""
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
            return self._speech.tell(sure)
        self._inside, self._held = True, rest
        return self._speech.tell(before.rstrip())

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
                found += self._speech.tell(self._listed.raw) if self._listed.name is None else []
                self._listed = None
        self._held = ""
        return found

    def _name(self) -> list[Event]:
        """Up to the arguments of a call."""
        name, brace, rest = self._held.partition("{")
        if not brace:
            return []
        name = name.partition(self._ID)[0].partition(self._ARGS)[0].strip()
        self._held, self._value = "{" + rest, ValueEnd()
        return [CallBegun(name)]

    def _arguments(self, value: ValueEnd) -> list[Event]:
        for place, character in enumerate(self._held):
            if value.take(character):
                told, self._value = self._held[: place + 1], None
                self._end(place + 1)
                return [Arguments(told)]
        told, self._held = self._held, ""
        return [Arguments(told)] if told else []

    def _end(self, place: int) -> None:
        """Calls end here; others may follow, behind another mark."""
        self._held, self._inside = self._held[place:], False
        self._speech.call()


FORMATS: dict[str, Callable[[Collection[str]], OutputReader]] = {
    "hermes": HermesReader,
    "llama3": LlamaReader,
    "mistral": MistralReader,
}
"""By the names of `SSD_TOOL_PARSER`."""

_SIGNS = (("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes"), ("<|python_tag|>", "llama3"))


def format_of(template: str) -> str | None:
    """The format that a chat template teaches; None where it teaches none that is known."""
    if '"parameters"' in template and "<|start_header_id|>" in template:
        return "llama3"
    return next((name for sign, name in _SIGNS if sign in template), None)
