"""Lookup: continues a text as it continued where its last tokens occurred before.

Needs no model. An index of neighbouring tokens finds the places of the last two at once, so that a text without a
match costs nothing. The matches are in a request's own tokens and in the history of its salt. Knows no messages.
"""

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ssd_serve.drafter.calibration import temperature_band
from ssd_serve.drafter.sources.contract import Branch

LONGEST = 32
"""Maximum length of a match."""
MAX_MATCHES = 32
"""Maximum places that one search compares: the latest ones."""
NOTHING = -1
"""Stands between the texts of a history."""
_NODES = 32
"""Maximum expanded nodes of a subtree."""
LEAST_REACH = 0.05
"""Minimum reach of a draft token: a row of a forward costs more than such a token is worth."""


class Match(NamedTuple):
    """The longest matches, of `length` tokens, and the tokens that follow each, the latest match first."""

    length: int
    following: list[list[int]]


class TokenIndex:
    """Tokens that only grow, with the places of each pair of neighbours. Single tokens are not looked up: hardly
    any continuation of theirs is right."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._latest: dict[int, int] = {}
        """Place of the second token of each pair, the latest one."""
        self._earlier: list[int] = []
        """For each place the one before it with the same pair; -1: there is none."""
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def repeats(self) -> bool:
        """True if the last two tokens occurred before."""
        return bool(self._earlier) and self._earlier[-1] >= 0

    def extend(self, tokens: Sequence[int]) -> None:
        known, latest, earlier = self.tokens, self._latest, self._earlier
        last = known[-1] if known else NOTHING
        for token in tokens:
            pair = last << 32 | token
            earlier.append(latest.get(pair, -1))
            latest[pair] = len(known)
            known.append(token)
            last = token

    def match(self, most: int) -> Match | None:
        """Earlier occurrences of the end of the tokens, with `most` following tokens. A continuation that reaches
        the end repeats cyclically."""
        if not self.repeats:
            return None
        length, places = self._longest(self.tokens, self._earlier[-1])
        return Match(length, [self._cyclic(place + 1, most) for place in places])

    def match_elsewhere(self, text: Sequence[int], most: int) -> Match | None:
        """Occurrences of the end of another text; nothing follows `NOTHING`."""
        if len(text) < 2:
            return None
        length, places = self._longest(text, self._latest.get(text[-2] << 32 | text[-1], -1))
        following = [self.tokens[place + 1 : place + 1 + most] for place in places]
        parts = [each[: each.index(NOTHING)] if NOTHING in each else each for each in following]
        return Match(length, parts) if any(parts) else None

    def _longest(self, text: Sequence[int], place: int) -> tuple[int, list[int]]:
        """Return the length of the longest matches of the end of `text`, and their last places, among the chain of
        places that begins at `place`."""
        tokens, end = self.tokens, len(text) - 1
        longest, found = 1, list[int]()
        for _ in range(MAX_MATCHES):
            if place < 0:
                break
            most = min(LONGEST, place + 1, end + 1)
            length = 2
            while length < most and tokens[place - length] == text[end - length]:
                length += 1
            if length > longest:
                longest, found = length, []
            if length == longest:
                found.append(place)
            place = self._earlier[place]
        return longest, found

    def _cyclic(self, start: int, most: int) -> list[int]:
        following = self.tokens[start : start + most]
        return (following * (most // len(following) + 1))[:most]


class SharedHistory:
    """Tokens of finished requests by salt, at most `limit` of one salt and about twice as many in all.

    Requests of different salts never find each other's tokens. The least recently used salt is evicted first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._texts: OrderedDict[bytes, TokenIndex] = OrderedDict()
        self._kept = 0

    def __len__(self) -> int:
        return self._kept

    def add(self, salt: bytes, tokens: Sequence[int]) -> None:
        """Add the tokens of a finished request."""
        text = self._texts.setdefault(salt, TokenIndex())
        self._texts.move_to_end(salt)
        self._kept -= len(text)
        text.extend((NOTHING, *tokens[-self._limit :]))
        self._kept += len(text)
        while self._kept > 2 * self._limit and len(self._texts) > 1:
            _, oldest = self._texts.popitem(last=False)
            self._kept -= len(oldest)
        if self._kept > 2 * self._limit:  # rarely, since it copies what is kept
            self._texts[salt] = text = TokenIndex(text.tokens[-self._limit :])
            self._kept = len(text)

    def match(self, salt: bytes, text: Sequence[int], most: int) -> Match | None:
        """Occurrences of the end of a text in the history of a salt."""
        index = self._texts.get(salt)
        if index is None:
            return None
        self._texts.move_to_end(salt)
        return index.match_elsewhere(text, most)


def branches(
    match: Match, share: Callable[[int], float], fan_out: int, depth: int, least: float = LEAST_REACH
) -> list[Branch]:
    """Return the subtree of a match to `depth` levels, likeliest nodes first, without nodes below a reach of `least`.
    `share`: probability that one of the continuations of a match of this length is right; a match grows by one
    token with each level."""
    found: list[Branch] = []
    if share(match.length) < least:
        return found
    log_least = math.log(least)
    waiting: list[tuple[float, tuple[int, ...], list[list[int]]]] = [(0.0, (), match.following)]
    while waiting and len(found) < _NODES:
        cost, path, texts = heapq.heappop(waiting)
        level = len(path)
        texts = [text for text in texts if len(text) > level]
        if level == depth or not texts:
            continue
        tokens = [text[level] for text in texts]
        alike = tokens.count(tokens[0]) == len(tokens)
        counts = [(tokens[0], len(tokens))] if alike else Counter(tokens).most_common(fan_out)
        right = share(match.length + level)
        values = [math.log(right * count / len(tokens)) for _, count in counts]
        found.append(Branch(path, [token for token, _ in counts], values))
        for (token, _), value in zip(counts, values, strict=True):
            if value - cost >= log_least:
                below = texts if alike else [text for text in texts if text[level] == token]
                heapq.heappush(waiting, (cost - value, (*path, token), below))
    return found


_MEMORY = 256.0
"""Observations of one length after which old ones fade."""
_PRIOR = 8.0
"""Pseudo-count of the start value."""
_HALF = 3.0
"""Match length at which a continuation is right half of the time, before any observation."""


@dataclass(slots=True)
class _Seen:
    right: float
    all: float = _PRIOR


def _nothing_seen() -> list[_Seen]:
    return [_Seen(_PRIOR * length / (length + _HALF)) for length in range(LONGEST + 1)]


@dataclass(frozen=True, slots=True)
class MatchAccuracy:
    """The accuracy of continuations by temperature band and match length, learnt online."""

    _bands: list[list[_Seen]] = field(default_factory=lambda: [_nothing_seen() for _ in range(3)])

    def share(self, temperature: float, length: int) -> float:
        """Probability that one of the continuations is right; strictly between 0 and 1."""
        seen = self._bands[temperature_band(temperature)][min(length, LONGEST)]
        return (seen.right + 0.05) / (seen.all + 0.1)

    def observe(self, temperature: float, length: int, right: bool) -> None:
        """Count an outcome: one of the continuations was right, or none."""
        seen = self._bands[temperature_band(temperature)][min(length, LONGEST)]
        if seen.all >= _MEMORY:
            seen.right *= 1 - 1 / _MEMORY
            seen.all *= 1 - 1 / _MEMORY
        seen.right += right
        seen.all += 1
