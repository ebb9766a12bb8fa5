"""Texts of requests that are over, in which later ones of the same salt are looked up too.

Texts of different salts are never found by each other. All of them together have a bound; the salt that was
used longest ago makes room first. Knows tokens and salts, not who has them.
"""

from collections import OrderedDict

from ssd_serve.drafter.lookup.text import NOTHING, GrowingText, Match, Tokens, match_elsewhere


class SharedTexts:
    """At most `limit` tokens of recent requests."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._texts: OrderedDict[bytes, GrowingText] = OrderedDict()
        self._kept = 0

    def __len__(self) -> int:
        """Tokens that are kept."""
        return self._kept

    def add(self, salt: bytes, tokens: Tokens) -> None:
        """A request of this salt is over."""
        text = self._texts.setdefault(salt, GrowingText(()))
        self._texts.move_to_end(salt)
        self._kept -= len(text)
        text.extend([NOTHING])
        text.extend(tokens[-self._limit :])
        self._kept += len(text)
        while self._kept > 2 * self._limit and len(self._texts) > 1:
            _, oldest = self._texts.popitem(last=False)
            self._kept -= len(oldest)
        if self._kept > 2 * self._limit:  # not with every request: it copies all that stays
            text.keep_last(self._limit)
            self._kept = len(text)

    def match(self, salt: bytes, suffix: Tokens, most: int) -> Match | None:
        """Where the end of a text stands in these."""
        text = self._texts.get(salt)
        if text is None:
            return None
        self._texts.move_to_end(salt)
        return match_elsewhere(text.tokens, suffix, most)
