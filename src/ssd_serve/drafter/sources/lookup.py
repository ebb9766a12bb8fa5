"""Lookup as a draft source: the text is expected to go on as it did where its last tokens stood before.

Needs no model: a whole subtree follows from one search, in some tens of microseconds. Knows the requests' own
texts and those of earlier ones that they may find, and of their parameters the temperature.
"""

# ruff: noqa: ARG002 (a source is told more than this one needs)

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.drafter.calibration import temperature_band
from ssd_serve.drafter.sources.contract import Branch, NodeRequest, Subtree
from ssd_serve.drafter.sources.lookup_text import LONGEST, NOTHING, Match, SharedHistory, TokenHistory

_DEPTH = 24
"""Levels of a subtree at most."""
_NODES = 32
"""Nodes of a subtree that are expanded at most."""
_LEAST = math.log(0.02)
"""Log reach, from the node where the search began, below which nothing is worth a message."""

Path = tuple[int, ...]


@dataclass(slots=True)
class _Held:
    text: TokenHistory
    temperature: float
    salt: bytes = b""
    guesses: dict[Path, tuple[int, frozenset[int]]] = field(
        default_factory=dict[Path, tuple[int, frozenset[int]]]
    )
    """By the path from the root: how many tokens the places share there, and what followed them."""


class LookupSource:
    """`DraftSource` over the requests' own texts and, where they are given, over `shared` ones; `fan_out`
    candidates of a node at most."""

    is_warmup_step = False

    def __init__(self, fan_out: int, shared: SharedHistory | None = None) -> None:
        self._fan_out = fan_out
        self._shared = shared
        self._trust = MatchAccuracy()
        self._requests: dict[int, _Held] = {}

    def open(self, request: int, tokens: Sequence[int], parameters: SamplingParameters, seed: int) -> None:
        self._requests[request] = _Held(TokenHistory(tokens), parameters.temperature)

    def salt(self, request: int, salt: bytes) -> None:
        """An open request finds the texts of this salt."""
        self._requests[request].salt = salt

    def share(self, request: int) -> None:
        """A request is over: others of its salt may find its text."""
        held = self._requests.get(request)
        if held is not None and self._shared is not None:
            self._shared.add(held.salt, held.text.tokens)

    def commit(self, request: int, tokens: Sequence[int], path: Sequence[int], kept: Sequence[int]) -> None:
        held = self._requests[request]
        held.text.extend(tokens)
        committed = tuple(tokens)
        for length, token in enumerate(committed):
            shared, followers = held.guesses.get(committed[:length], (0, frozenset[int]()))
            if not followers:
                break
            self._trust.observe(held.temperature, shared, token in followers)
        past = len(committed)
        held.guesses = {
            found[past:]: guess for found, guess in held.guesses.items() if found[:past] == committed
        }

    def expand(self, picks: Sequence[NodeRequest], scales: Sequence[float]) -> list[Subtree | None]:
        return [self._subtree(self._requests[pick.request], pick.tokens) for pick in picks]

    def close(self, request: int) -> None:
        self._requests.pop(request, None)

    def _subtree(self, held: _Held, path: Path) -> Subtree | None:
        """What followed the places that are most alike, best first; its own where others are as alike."""
        match = held.text.match(path, _DEPTH)
        if self._shared is not None:
            found = self._shared.match(held.salt, held.text.with_path(path)[-LONGEST:], _DEPTH)
            if found is not None and (match is None or found.length > match.length):
                match = found
        if match is None:
            return None
        return Subtree(tuple(self._branches(held, path, match)))

    def _branches(self, held: _Held, path: Path, match: Match) -> list[Branch]:
        """Level by level. Where the text has followed a place so far, the two share as many tokens more."""
        branches: list[Branch] = []
        level: list[tuple[Path, float, list[list[int]]]] = [((), 0.0, match.following)]
        for depth in range(_DEPTH):
            shared = match.length + depth
            share = self._trust.share(held.temperature, shared)
            deeper: list[tuple[Path, float, list[list[int]]]] = []
            for below, reach, places in level:
                counts = Counter(
                    [token for place in places if (token := place[depth]) != NOTHING]
                ).most_common(self._fan_out)
                if not counts:
                    continue
                values = [math.log(share * count / len(places)) for _, count in counts]
                branches.append(Branch(below, [token for token, _ in counts], values))
                held.guesses[path + below] = shared, frozenset(branches[-1].tokens)
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
"""Guesses of one length that are remembered, about."""
_PRIOR = 8.0
"""Guesses that the start value weighs as much as."""
_HALF = 3.0
"""Tokens in common of which every other place should go on alike, before anything is known."""


@dataclass(slots=True)
class _Seen:
    right: float
    all: float = _PRIOR


def _nothing_seen() -> list[_Seen]:
    return [_Seen(_PRIOR * length / (length + _HALF)) for length in range(LONGEST + 1)]


@dataclass(frozen=True, slots=True)
class MatchAccuracy:
    """By temperature band and shared tokens."""

    _bands: list[list[_Seen]] = field(default_factory=lambda: [_nothing_seen() for _ in range(3)])

    def share(self, temperature: float, length: int) -> float:
        """Probability that the text goes on as one of the places did, from above 0 to below 1."""
        seen = self._bands[temperature_band(temperature)][min(length, LONGEST)]
        return (seen.right + 0.05) / (seen.all + 0.1)

    def observe(self, temperature: float, length: int, right: bool) -> None:
        """One of them was right, or none."""
        seen = self._bands[temperature_band(temperature)][min(length, LONGEST)]
        if seen.all >= _MEMORY:
            seen.right *= 1 - 1 / _MEMORY
            seen.all *= 1 - 1 / _MEMORY
        seen.right += right
        seen.all += 1
