"""What a model's text says besides its words: thoughts, and calls of tools.

A reader takes the text in pieces of any size and tells what it has understood so far. However a text is cut
into pieces, the same is told: speculation brings several tokens at once, and how many must not matter.
Knows no tokens, no HTTP and no format.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Words:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool by its name; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of the arguments of the call that began last."""

    text: str


Event = Words | Thought | CallBegun | Arguments


class OutputReader(Protocol):
    """Reads one output from its beginning to its end."""

    def push(self, text: str) -> list[Event]:
        """What is certain once this text has come."""
        ...

    def finish(self) -> list[Event]:
        """The rest, when no more comes: what could still have become something else is words."""
        ...


def certain(text: str, marker: str) -> str:
    """What of a text stays, whatever follows: not what may begin a marker, nor the white space before it."""
    longest = min(len(text), len(marker) - 1)
    begun = next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
    return text[: len(text) - begun].rstrip()
