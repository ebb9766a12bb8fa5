"""Token histories that are searched for earlier occurrences of their last tokens, of one request or of one
salt.

Plain numpy: one search covers a whole history at once.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LONGEST = 32
"""Maximum length of a match."""
_SHORTEST_ELSEWHERE = 2
"""Minimum length of a match in other requests: single tokens match too often."""
MAX_MATCHES = 32
"""Maximum matches of one search; the latest ones are used."""

Tokens = npt.NDArray[np.int32]
NOTHING = -1
"""Stands in place of a token after the end of a text."""
_BACK = np.arange(LONGEST)


class Match(NamedTuple):
    """The longest matches, of `length` tokens, and the tokens that follow each, the latest match first."""

    length: int
    following: list[list[int]]


class TokenHistory:
    """A growing int32 array of tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: Tokens = np.array(tokens, dtype=np.int32)
        self._length = len(tokens)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> Tokens:
        """The tokens, int32 [length]; valid until the next change."""
        return self._tokens[: self._length]

    def extend(self, tokens: Sequence[int] | Tokens) -> None:
        self._length = self._write(tokens)

    def keep_last(self, count: int) -> None:
        if self._length > count:
            self._tokens = self.tokens[-count:].copy()
            self._length = count

    def with_path(self, path: Sequence[int]) -> Tokens:
        """The tokens followed by `path`, int32 [length + path]; valid until the next call."""
        end = self._write(path)  # it may reallocate
        return self._tokens[:end]

    def match(self, path: Sequence[int], most: int) -> Match | None:
        """Earlier occurrences of the end of the tokens followed by `path`, with `most` following tokens.

        None if the last token has not occurred before. A continuation that reaches the end repeats
        cyclically.
        """
        whole = self.with_path(path)
        if len(whole) < 2:
            return None
        found = _places(whole[:-1], whole)
        if found is None:
            return None
        length, first = found
        return Match(length, whole[first[:, None] + np.arange(most) % (len(whole) - first)[:, None]].tolist())

    def _write(self, tokens: Sequence[int] | Tokens) -> int:
        """Write tokens after the end without moving it; returns the new end."""
        end = self._length + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * end)
        self._tokens[self._length : end] = tokens
        return end


def match_elsewhere(text: Tokens, suffix: Tokens, most: int) -> Match | None:
    """Occurrences of the end of `suffix` in other tokens; `NOTHING` follows after their end."""
    found = _places(text, suffix) if len(text) and len(suffix) else None
    if found is None or found[0] < _SHORTEST_ELSEWHERE:
        return None
    length, first = found
    wanted = first[:, None] + np.arange(most)
    following = np.where(wanted < len(text), text[np.minimum(wanted, len(text) - 1)], NOTHING)
    return Match(length, following.tolist())


def _places(text: Tokens, suffix: Tokens) -> tuple[int, npt.NDArray[np.int64]] | None:
    """The length of the longest matches of the end of `suffix` in `text`, and their ends, the latest
    first."""
    same = text == suffix[-1]
    places = np.empty(0, dtype=np.int64)
    if len(suffix) > 1:
        places = np.flatnonzero(same[1:] & (text[:-1] == suffix[-2])) + 1
    if not len(places):  # only for want of longer ones: they would crowd out older, longer matches
        places = np.flatnonzero(same)
    if not len(places):
        return None
    last = places[: -MAX_MATCHES - 1 : -1]
    before = last[:, None] - _BACK  # [places, LONGEST]
    wanted = len(suffix) - 1 - _BACK
    equal = text[np.maximum(before, 0)] == suffix[np.maximum(wanted, 0)]
    equal &= (before >= 0) & (wanted >= 0)
    lengths = np.where(equal.all(axis=1), LONGEST, equal.argmin(axis=1))
    longest = int(lengths.max())
    return longest, last[lengths == longest] + 1


class SharedHistory:
    """Tokens of finished requests by salt, at most `limit` of one salt and about twice as many in all.

    Requests of different salts never find each other's tokens. The least recently used salt is evicted first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._texts: OrderedDict[bytes, TokenHistory] = OrderedDict()
        self._kept = 0

    def __len__(self) -> int:
        return self._kept

    def add(self, salt: bytes, tokens: Tokens) -> None:
        """Add the tokens of a finished request."""
        text = self._texts.setdefault(salt, TokenHistory(()))
        self._texts.move_to_end(salt)
        self._kept -= len(text)
        text.extend([NOTHING])
        text.extend(tokens[-self._limit :])
        self._kept += len(text)
        while self._kept > 2 * self._limit and len(self._texts) > 1:
            _, oldest = self._texts.popitem(last=False)
            self._kept -= len(oldest)
        if self._kept > 2 * self._limit:  # rarely, since it copies what is kept
            text.keep_last(self._limit)
            self._kept = len(text)

    def match(self, salt: bytes, suffix: Tokens, most: int) -> Match | None:
        """Occurrences of the end of `suffix` in the history of a salt."""
        text = self._texts.get(salt)
        if text is None:
            return None
        self._texts.move_to_end(salt)
        return match_elsewhere(text.tokens, suffix, most)
