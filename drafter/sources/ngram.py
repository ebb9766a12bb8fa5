"""N-gram lookup as a draft source: what followed the longest suffix of the text where it stood before.

Needs no model. Knows the requests' own texts; a lookup goes over a whole text, in some tens of microseconds.
"""

# ruff: noqa: ARG002 (a source is told more than this one needs)

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ssd_serve.drafter.sources.contract import Candidates, NodeRequest
from ssd_serve.drafter.sources.loading import LoadedSource, SourceOrder, texts_of_target
from ssd_serve.messages import SamplingParameters

LONGEST = 8
"""Tokens that a suffix is compared by at most."""
_STEP_S = 5e-5
_ELSE = 2.0
"""What all other tokens weigh together, where one that followed a suffix of n tokens once weighs n."""

Tokens = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Text:
    """A growing text: the first `length` of `tokens`."""

    tokens: Tokens
    length: int

    def extend(self, tokens: Sequence[int]) -> None:
        end = self.length + len(tokens)
        if end > len(self.tokens):
            self.tokens = np.resize(self.tokens, 2 * end)
        self.tokens[self.length : end] = tokens
        self.length = end


class NgramSource:
    """`DraftSource` over the requests' own texts. Parameters and seeds do not matter to it."""

    captured_now = False

    def __init__(self, fan_out: int) -> None:
        self._fan_out = fan_out
        self._texts: dict[int, _Text] = {}

    def open(self, request: int, tokens: Sequence[int], parameters: SamplingParameters, seed: int) -> None:
        self._texts[request] = _Text(np.array(tokens, dtype=np.int32), len(tokens))

    def commit(self, request: int, tokens: Sequence[int], path: Sequence[int], kept: Sequence[int]) -> None:
        self._texts[request].extend(tokens)

    def expand(self, picks: Sequence[NodeRequest], scales: Sequence[float]) -> list[Candidates | None]:
        return [self._candidates(self._texts[pick.request], pick.tokens) for pick in picks]

    def close(self, request: int) -> None:
        self._texts.pop(request, None)

    def _candidates(self, text: _Text, path: Sequence[int]) -> Candidates | None:
        """What followed the longest suffix, most often first. None: even the last token is new."""
        known = text.tokens[: text.length]
        matched, followers = longest_match(known, (*known[-LONGEST:].tolist(), *path))
        if not matched:
            return None
        tokens, counts = np.unique(followers, return_counts=True)
        best = np.argsort(-counts, kind="stable")[: self._fan_out]
        shares = matched * counts[best] / (matched * counts.sum() + _ELSE)
        scores = np.log(shares, dtype=np.float32)
        return Candidates(tokens[best], scores, scores, float(shares @ scores))


def longest_match(text: Tokens, suffix: Sequence[int]) -> tuple[int, Tokens]:
    """How many of the last tokens of `suffix`, up to `LONGEST`, stand elsewhere in `text` with something
    behind them, and what that is, place by place."""
    places = np.flatnonzero(text[:-1] == suffix[-1])
    matched = int(len(places) > 0)
    while matched and matched < min(LONGEST, len(suffix)):
        longer = places[(places >= matched) & (text[places - matched] == suffix[-1 - matched])]
        if not len(longer):
            break
        places, matched = longer, matched + 1
    return matched, text[places + 1]


def load_ngram(order: SourceOrder) -> LoadedSource:
    """There is nothing to load."""
    source = NgramSource(order.settings.draft_fan_out)
    return LoadedSource(source, texts_of_target(order.settings), dict.fromkeys(order.widths, _STEP_S))
