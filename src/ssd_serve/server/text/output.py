"""Tokens to text, one token at a time: detokenization, stop strings, and the count of output tokens.

Text, usage and finish reason do not depend on how messages group tokens. Knows nothing about HTTP or the
engine.
"""

from dataclasses import dataclass, field
from typing import Protocol

from ssd_serve.server.text.stops import StopScanner, StopStrings


class Detokenizer(Protocol):
    """Incremental decoding of one output; bytes of an unfinished character are held back."""

    def push(self, token: int) -> str:
        """Return the text that is certain with this token."""
        ...

    def flush(self) -> str:
        """Return the text that is still held back, at the end."""
        ...


@dataclass(frozen=True, slots=True)
class TextRules:
    """Rules of one request for its text."""

    stops: StopStrings = field(default_factory=StopStrings)
    include_stop: bool = False
    min_tokens: int = 0
    """Stop strings have no effect in the first `min_tokens` tokens."""
    stop_token_set: frozenset[int] = frozenset()
    """Ids that may end the output; their text is held back until the engine reports the end or more tokens."""


class TextAssembler:
    """The text of one choice. Push tokens in order until one stops; then, or at the end, `finish`."""

    def __init__(self, detokenizer: Detokenizer, rules: TextRules) -> None:
        self._detokenizer = detokenizer
        self._rules = rules
        self._scanner = StopScanner(rules.stops, rules.include_stop)
        self._waiting: int | None = None
        self.tokens = 0
        """Tokens that count as output."""
        self.length = 0
        """Characters decoded so far, held back ones included."""
        self.stopped_by: str | None = None

    def push(self, token: int) -> str:
        """Add one token and return the text that it makes certain.

        The token is not counted in `tokens` where the text stopped before it.
        """
        text = self._settle()
        if self.stopped_by is not None:
            return text
        self.tokens += 1
        if token in self._rules.stop_token_set:
            self._waiting = token
            return text
        return text + self._decode(token)

    def finish(self, stop_token: int | None = None) -> str:
        """End the text; the text of `stop_token`, the id that ended it, is included only where requested."""
        if self.stopped_by is not None:
            return ""
        if self._waiting is not None and self._waiting == stop_token and not self._rules.include_stop:
            self._waiting = None
        text = self._settle()
        if self.stopped_by is None:
            text += self._search(self._detokenizer.flush())
        if self.stopped_by is None:
            text += self._scanner.release()
        return text

    def _settle(self) -> str:
        """Decode a held token that was not the end."""
        if self._waiting is None:
            return ""
        token, self._waiting = self._waiting, None
        return self._decode(token)

    def _decode(self, token: int) -> str:
        return self._search(self._detokenizer.push(token))

    def _search(self, new: str) -> str:
        self.length += len(new)
        if not self._rules.stops.strings or self.tokens <= self._rules.min_tokens:
            return new
        text, self.stopped_by = self._scanner.feed(new)
        return text
