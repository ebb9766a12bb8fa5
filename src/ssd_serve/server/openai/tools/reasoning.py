"""Splits what a model thinks from what it says: `<think> ... </think>`, as Qwen 3 and DeepSeek write it.

Knows the two marks. Whether the text begins among thoughts is told by the prompt, whose template may have
written the first mark already.
"""

from ssd_serve.sampling.thinking import BEGIN, END
from ssd_serve.server.openai.tools.events import Event, Thought, Words, certain


class ThoughtReader:
    """Tells thoughts and words of one output. Thoughts come first or not at all; white space around them is
    nobody's."""

    def __init__(self, thinking: bool) -> None:
        self._thinking = thinking
        self._may_think = not thinking
        self._bare = True
        """Nothing but white space has come of the present part."""
        self._held = ""

    def push(self, text: str) -> list[Event]:
        """See `OutputReader`."""
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
                self._bare = False
        if self._thinking:
            thought, mark, rest = self._held.partition(END)
            if not mark:
                sure = certain(thought, END)
                self._held = thought[len(sure) :]
                return found + self._thought(sure)
            found += self._thought(thought.rstrip())
            self._held, self._thinking, self._bare = rest, False, True
        return [*found, *self._words()]

    def finish(self) -> list[Event]:
        """See `OutputReader`."""
        held, self._held = self._held, ""
        if self._thinking:
            return self._thought(held.rstrip())
        return [Words(held)] if held else []

    def _thought(self, text: str) -> list[Event]:
        text = text.lstrip() if self._bare else text
        self._bare = self._bare and not text
        return [Thought(text)] if text else []

    def _words(self) -> list[Event]:
        text, self._held = self._held, ""
        if self._bare:
            text = text.lstrip()
            self._bare = not text
        return [Words(text)] if text else []
