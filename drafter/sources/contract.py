"""What a draft source is: the part of a drafter that guesses.

A source remembers what it must about each request (KV, features) by node; it never sees sockets, budgets or
other requests' priorities. The tree belongs to the drafter's core, which names nodes by their 64-bit chain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ssd_serve.messages import SamplingParameters


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """Expand `node` of `request`: its parent chain below the root is `path` (names, root's child first, the
    node itself last; empty for the root), `tokens` are the tokens of that path."""

    request: int
    node: int
    path: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Ranked children of one expanded node, best first."""

    tokens: npt.NDArray[np.int32]  # [fan_out]
    log_probabilities: npt.NDArray[np.float32]  # [fan_out], conditional, calibrated with `scale`
    scores: npt.NDArray[np.float32]  # [fan_out], noisy scores before the scale
    expected_score: float
    """Mean score under the calibrated distribution: with the truth's score it gives the gradient of the
    scale."""


class DraftSource(Protocol):
    """`open / commit / expand / close`; re-rooting is part of `commit`."""

    @property
    def captured_now(self) -> bool:
        """Whether the last step was recorded first, so that its time says nothing of later ones."""
        ...

    def open(self, request: int, tokens: Sequence[int], parameters: SamplingParameters, seed: int) -> None:
        """Begin a request whose committed tokens are `tokens`; the last one is the root."""
        ...

    def commit(self, request: int, tokens: Sequence[int], path: Sequence[int], kept: Sequence[int]) -> None:
        """`tokens` were committed. `path` names the tree nodes that they were, as far as they were nodes (a
        prefix of the tokens); `kept` names the expanded nodes that stay in the tree; all others are gone."""
        ...

    def expand(self, picks: Sequence[NodeRequest], scales: Sequence[float]) -> list[Candidates | None]:
        """One draft step: the children of every pick, or None for a pick that memory has no room for now.

        Feeds missing committed tokens and ancestors first where a pick needs them.
        """
        ...

    def close(self, request: int) -> None:
        """Free everything of the request; unknown requests are ignored."""
        ...
