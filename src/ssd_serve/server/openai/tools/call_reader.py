"""Reads the JSON text of one value, or of one call of a tool, character by character, as a model writes it.

The text of the arguments is handed on as it comes, not understood: it is the client's to parse. Knows JSON's
brackets and strings, no format's markers.
"""

import json

from ssd_serve.server.openai.tools.events import Arguments, CallBegun, Event

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class ValueEnd:
    """Finds where a JSON value ends. An object, a list or a string ends with a character of its own; other
    values end before the next comma or bracket."""

    def __init__(self) -> None:
        self.depth = 0
        self.quoted = False
        self.plain = False
        self._escaped = False

    def take(self, character: str) -> bool:
        """Whether the value ends with this character. One that does not begin with a bracket or a quote is
        told by `plain`."""
        if self.quoted:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self.quoted = False
                return self.depth == 0
            return False
        if character == '"':
            self.quoted = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1
            return self.depth == 0
        elif self.depth == 0:
            self.plain = True
        return False


class CallReader:
    """Reads `{"name": ..., "arguments": {...}}`, with `parameters` for the same and the names in any order.

    `done` once the object has ended; until `name` is known nothing is told.
    """

    def __init__(self) -> None:
        self._raw: list[str] = []
        self.done = False
        self.name: str | None = None
        self._key: str | None = None
        self._member: list[str] = []
        self._value: ValueEnd | None = None
        self._begun = False
        self._waiting = ""
        """Arguments that came before the name."""
        self._told = False
        """Whether arguments were told."""

    @property
    def raw(self) -> str:
        """What it was given before it had a name."""
        return "".join(self._raw)

    def take(self, character: str) -> list[Event]:
        """What one more character tells."""
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
            self._member, self._value = [], ValueEnd()
        return []

    def _in_value(self, value: ValueEnd, character: str) -> list[Event]:
        if not self._member and character in _SPACE:
            return []
        if value.plain and character in ",}":
            return self._ended() + (self._end() if character == "}" else [])
        self._member.append(character)
        over = value.take(character)
        found: list[Event] = []
        if self._key in _ARGUMENTS and self._member[0] == "{":
            found = self._arguments(character)
        return found + (self._ended() if over else [])

    def _ended(self) -> list[Event]:
        """A member is complete."""
        text, key = "".join(self._member).rstrip(), self._key
        self._member, self._value, self._key = [], None, None
        if key == "name":
            self.name = _string(text)
            if self.name is None:
                return []
            waiting, self._waiting = self._waiting, ""
            return [CallBegun(self.name), *([Arguments(waiting)] if waiting else [])]
        if key in _ARGUMENTS and not text.startswith("{"):
            inner = _string(text)  # some models write the JSON text as a string
            return self._arguments(text if inner is None else inner)
        return []

    def _arguments(self, text: str) -> list[Event]:
        self._told = True
        if self.name is None:
            self._waiting += text
            return []
        return [Arguments(text)]

    def _end(self) -> list[Event]:
        self.done = True
        if self.name is None or self._told:
            return []
        return [Arguments("{}")]


def _string(text: str) -> str | None:
    """The string that a JSON text is; None for anything else."""
    try:
        found: object = json.loads(text, strict=False)
    except ValueError:
        return None
    return found if isinstance(found, str) else None
