"""A growing text in which the places are found where its last tokens stood before, and what followed there.

Plain numpy: a search goes over the whole text at once. Knows tokens; not what they are looked up for.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LONGEST = 32
"""Tokens by which a place is compared at most."""
_SHORTEST_ELSEWHERE = 2
"""Tokens that a place in another text must share: single ones stand in too many."""
MAX_PLACES = 32
"""Most of one search: the last ones in the text."""

Tokens = npt.NDArray[np.int32]
NOTHING = -1
"""Stands where a text is over."""
_BACK = np.arange(LONGEST)


class Match(NamedTuple):
    """The places that share the most: `length` tokens. `following`: what came after each, as far as it was
    asked for, the latest place first."""

    length: int
    following: list[list[int]]


class TokenHistory:
    """The tokens of one request: its prompt and its output."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: Tokens = np.array(tokens, dtype=np.int32)
        self._length = len(tokens)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> Tokens:
        """All of them, int32 [length]; valid until the text goes on."""
        return self._tokens[: self._length]

    def extend(self, tokens: Sequence[int] | Tokens) -> None:
        """The text goes on."""
        self._length = self._write(tokens)

    def keep_last(self, count: int) -> None:
        """Forget all but the last tokens."""
        if self._length > count:
            self._tokens = self.tokens[-count:].copy()
            self._length = count

    def with_path(self, path: Sequence[int]) -> Tokens:
        """The text and, behind it, some guesses: int32 [length + path]; valid until the next call."""
        end = self._write(path)  # it may make room
        return self._tokens[:end]

    def match(self, path: Sequence[int], most: int) -> Match | None:
        """Where the end of the text, followed by `path`, stood in it before, and `most` tokens after each
        place; None where its last token did not. What reaches the end goes on as if it repeated itself."""
        whole = self.with_path(path)
        if len(whole) < 2:
            return None
        found = _places(whole[:-1], whole)
        if found is None:
            return None
        length, first = found
        return Match(length, whole[first[:, None] + np.arange(most) % (len(whole) - first)[:, None]].tolist())

    def _write(self, tokens: Sequence[int] | Tokens) -> int:
        """Put tokens behind the text; where they end."""
        end = self._length + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * end)
        self._tokens[self._length : end] = tokens
        return end


def match_elsewhere(text: Tokens, suffix: Tokens, most: int) -> Match | None:
    """Where the end of `suffix` stands in another text, as in `TokenHistory.match`; behind the end of that
    text follow `NOTHING`s."""
    found = _places(text, suffix) if len(text) and len(suffix) else None
    if found is None or found[0] < _SHORTEST_ELSEWHERE:
        return None
    length, first = found
    wanted = first[:, None] + np.arange(most)
    following = np.where(wanted < len(text), text[np.minimum(wanted, len(text) - 1)], NOTHING)
    return Match(length, following.tolist())


def _places(text: Tokens, suffix: Tokens) -> tuple[int, npt.NDArray[np.int64]] | None:
    """By how many tokens the places in `text` agree with the end of `suffix` that do so most, and where they
    end: the last `MAX_PLACES` of them, the latest first."""
    same = text == suffix[-1]
    places = np.empty(0, dtype=np.int64)
    if len(suffix) > 1:
        places = np.flatnonzero(same[1:] & (text[:-1] == suffix[-2])) + 1
    if not len(places):  # there are many of single tokens, and better ones may be older
        places = np.flatnonzero(same)
    if not len(places):
        return None
    last = places[: -MAX_PLACES - 1 : -1]
    before = last[:, None] - _BACK  # [places, LONGEST]
    wanted = len(suffix) - 1 - _BACK
    equal = text[np.maximum(before, 0)] == suffix[np.maximum(wanted, 0)]
    equal &= (before >= 0) & (wanted >= 0)
    lengths = np.where(equal.all(axis=1), LONGEST, equal.argmin(axis=1))
    longest = int(lengths.max())
    return longest, last[lengths == longest] + 1


class SharedHistory:
    """At most `limit` tokens of recent requests."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._texts: OrderedDict[bytes, TokenHistory] = OrderedDict()
        self._kept = 0

    def __len__(self) -> int:
        """Tokens that are kept."""
        return self._kept

    def add(self, salt: bytes, tokens: Tokens) -> None:
        """A request of this salt is over."""
        text = self._texts.setdefault(salt, TokenHistory(()))
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
