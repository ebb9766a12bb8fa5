"""The contract of a draft source, the part of a drafter that proposes tokens.

A source keeps its state of each request (KV, features) by node name. It never sees sockets, budgets or other
requests' priorities. The tree belongs to the drafter's core.
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
    """A request to expand the node `at` of a request's tree; all its ancestors are expanded."""

    request: int
    at: Node
    allowed: Mask | None = None
    """Tokens that a grammar allows here, if known. The core drops other candidates; a source may ignore
    it."""

    @property
    def node(self) -> int:
        """The node's name."""
        return self.at.name

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens from the root's child down to the node; empty for the root."""
        tokens, node = list[int](), self.at
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tuple(reversed(tokens))


class Candidates(NamedTuple):
    """Ranked children of one node, best first."""

    tokens: npt.NDArray[np.int32]  # [fan_out]
    log_probabilities: npt.NDArray[np.float32]  # [fan_out], conditional, calibrated with the node's scale
    scores: npt.NDArray[np.float32]  # [fan_out], noisy scores before the scale
    expected_score: float
    """Mean score under the calibrated distribution; with the score of the target's choice it gives the
    gradient of the scale."""


class CandidateBatch(Sequence[Candidates]):
    """Candidates of all nodes of a step in arrays, the same number for each node."""

    __slots__ = ("expected_scores", "log_probabilities", "scores", "tokens")

    def __init__(
        self,
        tokens: npt.NDArray[np.int32],
        log_probabilities: npt.NDArray[np.float32],
        scores: npt.NDArray[np.float32],
        expected_scores: npt.NDArray[np.float32],
    ) -> None:
        """Arrays are [nodes, fan_out], expected scores [nodes]."""
        self.tokens = tokens
        self.log_probabilities = log_probabilities
        self.scores = scores
        self.expected_scores = expected_scores

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, rows: npt.NDArray[np.int64] | slice) -> "CandidateBatch":
        """The candidates of some nodes, in this order."""
        return CandidateBatch(
            self.tokens[rows], self.log_probabilities[rows], self.scores[rows], self.expected_scores[rows]
        )

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
    """Candidates of one node of a subtree, best first, with conditional log-probabilities."""

    path: tuple[int, ...]
    """Tokens from the expanded node down to this one; empty: the expanded node."""
    tokens: list[int]
    log_probabilities: list[float]
    scores: Sequence[float] = ()
    """Scores before the scale, which let the core calibrate; empty: these candidates are not calibrated."""
    expected_score: float = 0.0
    """See `Candidates`."""


class Subtree(NamedTuple):
    """Several levels below a node, parents first."""

    branches: Sequence[Branch]


class Block(NamedTuple):
    """Candidates of consecutive positions below one node, from one forward; see `drafter.blocks`.

    Positions are independent of each other unless `pairs` is given.
    """

    tokens: npt.NDArray[np.int32]  # [positions, candidates], best first
    log_probabilities: npt.NDArray[
        np.float32
    ]  # [positions, candidates], calibrated; with the noise of each position
    scores: npt.NDArray[np.float32]  # [positions, candidates], noisy scores before the scale
    expected_scores: npt.NDArray[np.float32]  # [positions], see `Candidates.expected_score`
    pairs: npt.NDArray[np.float32] | None = None
    """[positions - 1, candidates, candidates]: log-probabilities of each candidate of a position after each one of
    the position before it (given last), instead of the position's own."""


ExpandResult: TypeAlias = Candidates | Subtree | Block | None
"""The result for one node. None: nothing for now; the node is requested again after the root moves."""
Scales: TypeAlias = Sequence[float]
"""Scales of a node's candidates and of the levels below it; deeper levels have the last one."""


@runtime_checkable
class FeatureSource(Protocol):
    """A source that reads hidden states which the target computed for committed tokens."""

    def read(self, request: int, position: int, features: "torch.Tensor") -> None:
        """Take features [positions, width] of consecutive committed tokens, from `position` on.

        The described layers are concatenated. Features arrive before the outcome that follows them; there may
        be gaps.
        """
        ...


@runtime_checkable
class ChunkedPrefillSource(Protocol):
    """A source that splits a long prefill into several steps, so that other requests do not wait for it."""

    @property
    def pending_prefill(self) -> Collection[int]:
        """Requests with a prefill that the last step did not finish; their nodes got None and are
        requested again."""
        ...


class DraftSource(Protocol):
    """Proposes candidates for nodes. Requests are opened, committed to and closed by the core."""

    @property
    def is_warmup_step(self) -> bool:
        """True if the last step's time is no estimate of later ones: it captured a graph or ran a prefill."""
        ...

    def open(self, request: int, tokens: Sequence[int], parameters: SamplingParameters, seed: int) -> None:
        """Start a request with these committed tokens; the last one is the root."""
        ...

    def commit(self, request: int, tokens: Sequence[int], path: Sequence[int], kept: Sequence[int]) -> None:
        """Append committed tokens.

        `path` names the nodes of the first tokens, as far as they had nodes; `kept` names the expanded nodes
        that stay in the tree. All other nodes are gone.
        """
        ...

    def expand(self, requests: Sequence[NodeRequest], scales: Sequence[Scales]) -> Sequence[ExpandResult]:
        """Run one draft step: one result for each node, or a `CandidateBatch` of equally many candidates.

        None stands for a node without memory or knowledge now. Missing committed tokens and ancestors are
        computed first.
        """
        ...

    def close(self, request: int) -> None:
        """Free all state of a request; unknown requests are ignored."""
        ...
