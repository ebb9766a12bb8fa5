"""A draft source in a package of its own: drafts the token that last followed the newest token of the text.

docs/adding.md explains the contract. A source may be wrong: the target verifies each token.
"""

# ruff: noqa: ARG002 (this source ignores some arguments of the contract)

from collections.abc import Sequence

import numpy as np

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.drafter.sources.contract import Candidates, NodeRequest, Scales
from ssd_serve.drafter.sources.loading import LoadedSource, SourceConfig, target_tokenizer_info

PROBABILITY = 0.5
STEP_S = 1e-4


class LastFollower:
    """A `DraftSource` over the requests' own tokens."""

    is_warmup_step = False

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}

    def open(self, request: int, tokens: Sequence[int], parameters: SamplingParameters, seed: int) -> None:
        self._texts[request] = list(tokens)

    def commit(self, request: int, tokens: Sequence[int], path: Sequence[int], kept: Sequence[int]) -> None:
        self._texts[request] += tokens

    def expand(self, requests: Sequence[NodeRequest], scales: Sequence[Scales]) -> list[Candidates | None]:
        return [self._follower([*self._texts[each.request], *each.tokens]) for each in requests]

    def close(self, request: int) -> None:
        self._texts.pop(request, None)

    def _follower(self, text: list[int]) -> Candidates | None:
        for place in range(len(text) - 1, 0, -1):
            if text[place - 1] == text[-1]:
                score = np.log(np.array([PROBABILITY], dtype=np.float32))
                token = np.array([text[place]], dtype=np.int32)
                return Candidates(token, score, score, float(PROBABILITY * score[0]))
        return None


def load(source: SourceConfig) -> LoadedSource:
    tokenizer = target_tokenizer_info(source.config)
    return LoadedSource(LastFollower(), tokenizer, dict.fromkeys(source.widths, STEP_S))
