"""Lookup as a draft source: continues the text as it continued where its last tokens occurred before.

Needs no model: one search of some tens of microseconds gives a whole subtree. The matches are in the
request's own tokens and in the history of its salt.
"""

# ruff: noqa: ARG002 (this source ignores some arguments of the contract)

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.drafter.calibration import temperature_band
from ssd_serve.drafter.sources.contract import Branch, NodeRequest, Scales, Subtree
from ssd_serve.drafter.sources.lookup_text import LONGEST, NOTHING, Match, SharedHistory, TokenHistory
from ssd_serve.drafter.sources.registry import SourceDescription

_DEPTH = 24
"""Maximum levels of a subtree."""
_NODES = 32
"""Maximum expanded nodes of a subtree."""
_LEAST = math.log(0.02)
"""Minimum log reach below the node of the search."""
LOOKUP = SourceDescription(calibrated=False)

Path = tuple[int, ...]


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
