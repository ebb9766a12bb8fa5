"""Lookup as a draft source: continues the text as it continued where its last tokens occurred before.

Needs no model: one search with plain numpy, of some tens of microseconds, gives a whole subtree. The matches
are in the request's own tokens and in the history of its salt.
"""

# ruff: noqa: ARG002 (this source ignores some arguments of the contract)

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.drafter.calibration import temperature_band
from ssd_serve.drafter.sources.contract import Branch, NodeRequest, Scales, Subtree
from ssd_serve.drafter.sources.registry import SourceDescription

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
_DEPTH = 24
"""Maximum levels of a subtree."""
_NODES = 32
"""Maximum expanded nodes of a subtree."""
_LEAST = math.log(0.02)
"""Minimum log reach below the node of the search."""
LOOKUP = SourceDescription(calibrated=False)

Path = tuple[int, ...]


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


@dataclass(slots=True)
class _Request:
    text: TokenHistory
    temperature: float
    salt: bytes = b""
    drafted: dict[Path, tuple[int, frozenset[int]]] = field(
        default_factory=dict[Path, tuple[int, frozenset[int]]]
    )
    """The length of the match and the drafted tokens, by path from the root."""


class LookupSource:
    """A `DraftSource` over the requests' own tokens and the `shared` history, with up to `fan_out`
    candidates."""

    is_warmup_step = False

    def __init__(self, fan_out: int, shared: SharedHistory | None = None) -> None:
        self._fan_out = fan_out
        self._shared = shared
        self._accuracy = MatchAccuracy()
        self._requests: dict[int, _Request] = {}

    def open(self, request: int, tokens: Sequence[int], parameters: SamplingParameters, seed: int) -> None:
        self._requests[request] = _Request(TokenHistory(tokens), parameters.temperature)

    def salt(self, request: int, salt: bytes) -> None:
        """Allow an open request to use the history of this salt."""
        self._requests[request].salt = salt

    def share(self, request: int) -> None:
        """Add a finished request to the history of its salt."""
        held = self._requests.get(request)
        if held is not None and self._shared is not None:
            self._shared.add(held.salt, held.text.tokens)

    def commit(self, request: int, tokens: Sequence[int], path: Sequence[int], kept: Sequence[int]) -> None:
        held = self._requests[request]
        held.text.extend(tokens)
        committed = tuple(tokens)
        for length, token in enumerate(committed):
            shared, followers = held.drafted.get(committed[:length], (0, frozenset[int]()))
            if not followers:
                break
            self._accuracy.observe(held.temperature, shared, token in followers)
        past = len(committed)
        held.drafted = {
            found[past:]: guess for found, guess in held.drafted.items() if found[:past] == committed
        }

    def expand(self, requests: Sequence[NodeRequest], scales: Sequence[Scales]) -> list[Subtree | None]:
        return [self._subtree(self._requests[each.request], each.tokens) for each in requests]

    def close(self, request: int) -> None:
        self._requests.pop(request, None)

    def _subtree(self, held: _Request, path: Path) -> Subtree | None:
        """The continuations of the longest matches, best first; own tokens win ties against the history."""
        match = held.text.match(path, _DEPTH)
        if self._shared is not None:
            found = self._shared.match(held.salt, held.text.with_path(path)[-LONGEST:], _DEPTH)
            if found is not None and (match is None or found.length > match.length):
                match = found
        if match is None:
            return None
        return Subtree(tuple(self._branches(held, path, match)))

    def _branches(self, held: _Request, path: Path, match: Match) -> list[Branch]:
        """The subtree level by level. A match grows by one token with each level that follows it."""
        branches: list[Branch] = []
        level: list[tuple[Path, float, list[list[int]]]] = [((), 0.0, match.following)]
        for depth in range(_DEPTH):
            shared = match.length + depth
            share = self._accuracy.share(held.temperature, shared)
            deeper: list[tuple[Path, float, list[list[int]]]] = []
            for below, reach, places in level:
                counts = Counter(
                    [token for place in places if (token := place[depth]) != NOTHING]
                ).most_common(self._fan_out)
                if not counts:
                    continue
                values = [math.log(share * count / len(places)) for _, count in counts]
                branches.append(Branch(below, [token for token, _ in counts], values))
                held.drafted[path + below] = shared, frozenset(branches[-1].tokens)
                if len(branches) == _NODES:
                    return branches
                deeper += [
                    ((*below, token), reach + value, [place for place in places if place[depth] == token])
                    for (token, _), value in zip(counts, values, strict=True)
                    if reach + value >= _LEAST
                ]
            level = sorted(deeper, key=lambda each: -each[1])
        return branches


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
