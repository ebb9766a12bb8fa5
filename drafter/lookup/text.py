"""A growing text in which the places are found where its last tokens stood before, and what followed there.

Plain numpy: a search goes over the whole text at once. Knows tokens; not what they are looked up for.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LONGEST = 32
"""Tokens by which a place is compared at most."""
SHORTEST = 2
"""Tokens that a place must share: of single ones there are too many."""
MAX_PLACES = 32
"""Most of one search: the last ones in the text."""

Tokens = npt.NDArray[np.int32]
_BACK = np.arange(LONGEST)


class Match(NamedTuple):
    """The places that share the most: `length` tokens. `following`: what came after each, as far as it was
    asked for, the latest place first."""

    length: int
    following: list[list[int]]


class GrowingText:
    """The tokens of one request: its prompt and its output."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: Tokens = np.array(tokens, dtype=np.int32)
        self._length = len(tokens)

    def __len__(self) -> int:
        return self._length

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        self._length = self._write(tokens)

    def match(self, path: Sequence[int], most: int) -> Match | None:
        """Where the end of the text, followed by `path`, stood before, and at most `most` tokens after each
        place; None where no `SHORTEST` tokens did. What reaches the end goes on as if it repeated itself."""
        end = self._write(path)
        if end <= SHORTEST:
            return None
        whole = self._tokens[:end]
        places = np.flatnonzero((whole[1:-1] == whole[-1]) & (whole[:-2] == whole[-2]))
        if not len(places):
            return None
        last = places[: -MAX_PLACES - 1 : -1] + 1  # [places] of the tokens that equal the last one
        before = last[:, None] - _BACK  # [places, LONGEST]
        suffix = whole[np.maximum(end - 1 - _BACK, 0)]
        equal = (whole[np.maximum(before, 0)] == suffix) & (before >= 0)
        lengths = np.where(equal.all(axis=1), LONGEST, equal.argmin(axis=1))
        longest = int(lengths.max())
        first = last[lengths == longest] + 1
        offsets = np.arange(most) % (end - first)[:, None]
        return Match(longest, whole[first[:, None] + offsets].tolist())

    def _write(self, tokens: Sequence[int]) -> int:
        """Put tokens behind the text; where they end."""
        end = self._length + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * end)
        self._tokens[self._length : end] = tokens
        return end
