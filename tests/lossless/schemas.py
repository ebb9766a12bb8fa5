"""Schemas like those that programs ask for: nested, bounded, with and without names that may be left out."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
_NAMES = ("name", "id", "kind", "value", "items", "path", "level", "tags", "from", "até", "x-y", "is_open")
_WORDS = ("red", "green", "a b", 'say "no"', "naïve", "0", "", "null", "C:\\x", "日本")
_PATTERNS = ("^[a-z]{2,5}$", "^\\d{4}-\\d{2}$", "^(on|off)$", "^[A-Z][a-z]*/[0-9]{1,3}$")


def make_schema(seed: int) -> Schema:
    """One of them; the same for the same seed."""
    return _Maker(random.Random(seed)).thing(3)


class _Maker:
    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def thing(self, depth: int) -> Schema:
        simple: list[Callable[[], Schema]] = [self._text, self._number, self._of_few, self._plain]
        nested = [self._object, self._object, self._list, self._either]
        if depth == 3:
            return self._object(3)
        if depth > 0 and self._chance.random() < 0.5:
            return self._chance.choice(nested)(depth)
        return self._chance.choice(simple)()

    def _object(self, depth: int) -> Schema:
        names = self._chance.sample(_NAMES, self._chance.randint(1, 4))
        return {
            "type": "object",
            "properties": {name: self.thing(depth - 1) for name in names},
            "required": names[: self._chance.randint(0, len(names))],
            "additionalProperties": False,
        }

    def _list(self, depth: int) -> Schema:
        least = self._chance.randint(0, 2)
        return {
            "type": "array",
            "items": self.thing(depth - 1),
            "minItems": least,
            "maxItems": least + self._chance.randint(0, 2),
        }

    def _either(self, depth: int) -> Schema:
        return {"anyOf": [self.thing(depth - 1), {"type": "null"}]}

    def _text(self) -> Schema:
        if self._chance.random() < 0.4:
            return {"type": "string", "pattern": self._chance.choice(_PATTERNS)}
        return {"type": "string", "minLength": self._chance.randint(0, 3), "maxLength": 12}

    def _number(self) -> Schema:
        low = self._chance.randint(-50, 50)
        if self._chance.random() < 0.5:
            return {"type": "integer", "minimum": low, "maximum": low + self._chance.randint(0, 900)}
        return {"type": "integer", "exclusiveMinimum": low, "maximum": low + 1000}

    def _of_few(self) -> Schema:
        if self._chance.random() < 0.3:
            return {"const": self._chance.choice(_WORDS)}
        return {"enum": [*self._chance.sample(_WORDS, 3), 17, True, None]}

    def _plain(self) -> Schema:
        return {"type": self._chance.choice(["boolean", "null", ["boolean", "null"]])}
