"""An answer's message, read from its text: what was thought, said and called, whole or piece by piece.

Knows the shape of OpenAI's messages and deltas; no tokens, no choices' ends.
"""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ssd_serve.server.openai.tools.events import CallBegun, Event, OutputReader, Thought, Words
from ssd_serve.server.openai.tools.formats import FORMATS
from ssd_serve.server.openai.tools.reasoning import ThoughtReader

_SIGNS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 9
"""Templates of Mistral's models take ids of exactly so many letters and digits."""


@dataclass(frozen=True, slots=True)
class MessageRules:
    """What is looked for in an answer. `format` None: no calls; `thinking` None: no thoughts."""

    format: str | None = None
    tools: Collection[str] = ()
    parallel: bool = True
    thinking: bool | None = None
    """Whether the answer begins among thoughts."""
    include_thinking: bool = True

    def reader(self) -> "MessageReader":
        """Of one answer."""
        thoughts = None if self.thinking is None else ThoughtReader(self.thinking)
        calls = None if self.format is None else FORMATS[self.format](self.tools)
        return MessageReader(thoughts, calls, self.parallel)


class MessageReader:
    """Reads one answer: thoughts first, then words and calls; after the first call no other where they may
    not be several."""

    def __init__(self, thoughts: OutputReader | None, calls: OutputReader | None, parallel: bool) -> None:
        self._thoughts = thoughts
        self._calls = calls
        self._parallel = parallel
        self.calls = 0

    def push(self, text: str) -> list[Event]:
        """See `OutputReader`."""
        if self._thoughts is None:
            return self._said([Words(text)] if text else [])
        return self._said(self._thoughts.push(text))

    def finish(self) -> list[Event]:
        """See `OutputReader`."""
        found = self._said(self._thoughts.finish()) if self._thoughts is not None else []
        return found + (self._counted(self._calls.finish()) if self._calls is not None else [])

    def _said(self, events: Iterable[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            if isinstance(event, Words) and self._calls is not None:
                found += self._counted(self._calls.push(event.text))
            else:
                found.append(event)
        return found

    def _counted(self, events: Iterable[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            self.calls += isinstance(event, CallBegun)
            if self._parallel or self.calls < 2 or isinstance(event, Words):
                found.append(event)
        return found


@dataclass(slots=True)
class Call:
    """One call of a tool, as far as it has come."""

    identifier: str
    name: str
    arguments: list[str] = field(default_factory=list[str])

    def told(self) -> dict[str, object]:
        """As messages tell it."""
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.identifier, "type": "function", "function": function}


class MessageWriter:
    """Writes what a reader tells of one choice: as deltas of a stream, and as the message in the end. `seed`
    makes the ids of its calls."""

    def __init__(self, rules: MessageRules, seed: str) -> None:
        self._reader = rules.reader()
        self._include_thinking = rules.include_thinking
        self._seed = seed
        self._words: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Call] = []

    @property
    def called(self) -> bool:
        """Whether a tool was called."""
        return bool(self._calls)

    def skip(self, text: str) -> None:
        """What the client has already: none of it is told again but calls, which are told whole."""
        if text:
            self.push(text)
            self._words.clear()
            self._thoughts.clear()

    def push(self, text: str, last: bool = False) -> dict[str, object]:
        """The delta of more text, or of the last there is; empty where nothing is certain yet."""
        events = self._reader.push(text)
        return self._delta([*events, *self._reader.finish()] if last else events)

    def message(self) -> dict[str, object]:
        """All of it. Content is null where tools were called without a word."""
        words = "".join(self._words)
        message: dict[str, object] = {
            "role": "assistant",
            "content": words if words or not self._calls else None,
            "refusal": None,
        }
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = [call.told() for call in self._calls]
        return message

    def _delta(self, events: Iterable[Event]) -> dict[str, object]:
        known = len(self._calls)
        words: list[str] = []
        thoughts: list[str] = []
        arguments: dict[int, list[str]] = {}
        """More of them, by call."""
        for event in events:
            if isinstance(event, Words):
                words.append(event.text)
            elif isinstance(event, Thought):
                thoughts += [event.text] * self._include_thinking
            elif isinstance(event, CallBegun):
                arguments[len(self._calls)] = []
                self._calls.append(Call(_identifier(self._seed, len(self._calls)), event.name))
            else:
                self._calls[-1].arguments.append(event.text)
                arguments.setdefault(len(self._calls) - 1, []).append(event.text)
        self._words += words
        self._thoughts += thoughts
        found: dict[str, object] = {}
        if words:
            found["content"] = "".join(words)
        if thoughts:
            found["reasoning_content"] = "".join(thoughts)
        if arguments:
            found["tool_calls"] = [
                {"index": index, **self._calls[index].told()}
                if index >= known
                else {"index": index, "function": {"arguments": "".join(more)}}
                for index, more in arguments.items()
            ]
        return found


def _identifier(seed: str, index: int) -> str:
    """Letters and digits that no other call has."""
    number = int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest())
    signs: list[str] = []
    for _ in range(_ID_LENGTH):
        number, sign = divmod(number, len(_SIGNS))
        signs.append(_SIGNS[sign])
    return "".join(signs)
