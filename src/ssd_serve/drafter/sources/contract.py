"""What a draft source is: the part of a drafter that guesses.

A source remembers what it must about each request (KV, features) by node; it never sees sockets, budgets or
other requests' priorities. The tree belongs to the drafter's core, which names nodes by their 64-bit chain.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, overload, runtime_checkable

import numpy as np
import numpy.typing as npt

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.cache.node import Node
from ssd_serve.sampling.grammar import Mask

if TYPE_CHECKING:
    import torch


class NodeRequest(NamedTuple):
    """Expand the node `at` of the tree of `request`; all its ancestors have been expanded. `allowed`: the
    tokens that may follow, where that is known. Guesses of others are left out, so a source may heed it or
    not."""

    request: int
    at: Node
    allowed: Mask | None = None

    @property
    def node(self) -> int:
        """Its name."""
        return self.at.name

    @property
    def path(self) -> tuple[int, ...]:
        """Names of its parent chain below the root, root's child first, the node itself last; empty for the
        root."""
        return tuple(each.name for each in _chain(self.at))

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of that path."""
        return tuple(each.token for each in _chain(self.at))


def _chain(node: Node) -> list[Node]:
    chain: list[Node] = []
    while node.parent is not None:
        chain.append(node)
        node = node.parent
    chain.reverse()
    return chain


class Candidates(NamedTuple):
    """Ranked children of one expanded node, best first."""

    tokens: npt.NDArray[np.int32]  # [fan_out]
    log_probabilities: npt.NDArray[np.float32]  # [fan_out], conditional, calibrated with `scale`
    scores: npt.NDArray[np.float32]  # [fan_out], noisy scores before the scale
    expected_score: float
    """Mean score under the calibrated distribution: with the truth's score it gives the gradient of the
    scale."""


class CandidateBatch(Sequence[Candidates]):
    """Candidates of all picks of a step, equally many of each, in arrays: nothing is done for each of them
    that can be done for all."""

    __slots__ = ("expected_scores", "log_probabilities", "scores", "tokens")

    def __init__(
        self,
        tokens: npt.NDArray[np.int32],
        log_probabilities: npt.NDArray[np.float32],
        scores: npt.NDArray[np.float32],
        expected_scores: npt.NDArray[np.float32],
    ) -> None:
        """[picks, fan_out], but for the expected scores [picks]; see `Candidates`."""
        self.tokens = tokens
        self.log_probabilities = log_probabilities
        self.scores = scores
        self.expected_scores = expected_scores

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> Candidates: ...
    @overload
    def __getitem__(self, index: slice) -> list[Candidates]: ...
    def __getitem__(self, index: int | slice) -> Candidates | list[Candidates]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return Candidates(
            self.tokens[index],
            self.log_probabilities[index],
            self.scores[index],
            float(self.expected_scores[index]),
        )


class Branch(NamedTuple):
    """Candidates of one node of a subtree, best first, with conditional log-probabilities that are calibrated
    already."""

    path: tuple[int, ...]
    """Tokens from the expanded node down to this one; empty: the expanded node."""
    tokens: list[int]
    log_probabilities: list[float]


class Subtree(NamedTuple):
    """What a source that sees further than one level found below a node, parents first."""

    branches: Sequence[Branch]


ExpandResult: TypeAlias = Candidates | Subtree | None
"""Below one pick. None: nothing now, so it is considered again when the root moves."""


@runtime_checkable
class FeatureSource(Protocol):
    """A source that reads what the target has computed of committed tokens."""

    def read(self, request: int, position: int, features: "torch.Tensor") -> None:
        """Outputs of the layers that it asked for, side by side [places, width], of the committed tokens from
        a position on. They come before the outcome behind them; some may be missing."""
        ...


@runtime_checkable
class ChunkedPrefillSource(Protocol):
    """A source that reads a long text in several steps, so that no other request waits for all of it."""

    @property
    def unread(self) -> Collection[int]:
        """The requests whose texts the last step has not come to the end of: their picks got None, and are to
        be asked again at once."""
        ...


class DraftSource(Protocol):
    """`open / commit / expand / close`; re-rooting is part of `commit`."""

    @property
    def is_warmup_step(self) -> bool:
        """Whether the last step's time says nothing of later ones: it was recorded first, or has read a text
        before it could guess."""
        ...

    def open(self, request: int, tokens: Sequence[int], parameters: SamplingParameters, seed: int) -> None:
        """Begin a request whose committed tokens are `tokens`; the last one is the root."""
        ...

    def commit(self, request: int, tokens: Sequence[int], path: Sequence[int], kept: Sequence[int]) -> None:
        """`tokens` were committed. `path` names the tree nodes that they were, as far as they were nodes (a
        prefix of the tokens); `kept` names the expanded nodes that stay in the tree; all others are gone."""
        ...

    def expand(self, picks: Sequence[NodeRequest], scales: Sequence[float]) -> Sequence[ExpandResult]:
        """One draft step: the children of every pick, or a subtree, or None for a pick that memory has no
        room for now or nothing is known of; `CandidateBatch` where all have equally many children.

        Feeds missing committed tokens and ancestors first where a pick needs them.
        """
        ...

    def close(self, request: int) -> None:
        """Free everything of the request; unknown requests are ignored."""
        ...
