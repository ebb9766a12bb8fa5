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

    def __len__(self) -> int:
        """Tokens that are kept."""
        return sum(len(text) for text in self._texts.values())

    def add(self, salt: bytes, tokens: Tokens) -> None:
        """A request of this salt is over."""
        text = self._texts.setdefault(salt, GrowingText(()))
        self._texts.move_to_end(salt)
        text.extend([NOTHING])
        text.extend(tokens[-self._limit :])
        # Not with every request: it copies all that stays.
        while len(self) > 2 * self._limit:
            oldest = next(iter(self._texts))
            if oldest == salt:
                text.keep_last(self._limit)
            else:
                del self._texts[oldest]

    def match(self, salt: bytes, suffix: Tokens, most: int) -> Match | None:
        """Where the end of a text stands in these."""
        text = self._texts.get(salt)
        if text is None:
            return None
        self._texts.move_to_end(salt)
        return match_elsewhere(text.tokens, suffix, most)
