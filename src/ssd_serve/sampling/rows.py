"""Rows of a request as the sampler sees them: a root and a tree of nodes, with parameters and seed."""

from collections.abc import Sequence
from typing import NamedTuple

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.sampling.grammar import Masks
from ssd_serve.sampling.overrides import LogitOverrides
from ssd_serve.sampling.parameters import is_greedy
from ssd_serve.sampling.processors import RowContext, TokenCounts


class SamplingRows(NamedTuple):
    """Rows of a request in the order of their logits: the root, then a row for each node below it.

    Fields of the tree are parallel, parents before children.
    """

    parameters: SamplingParameters
    seed: int
    position: int
    """Absolute position (prompt + output) of the token that the first row chooses."""
    counts: TokenCounts | None = None
    """Needed where `needs_counts(parameters)`."""
    path: tuple[int, ...] = ()
    """Tokens of the first row after the counted output, in order."""
    generated: int = 0
    """Number of output tokens before the first row's choice, `path` included."""
    eos: tuple[int, ...] = ()
    known: int | None = None
    """Token at this position, if it is given (a prompt token): the first row only reports its
    log-probability."""
    tokens: Sequence[int] = ()
    """Tokens of the nodes."""
    parents: Sequence[int] = ()
    """Indices of the nodes' parents among the nodes; -1: the first row."""
    depths: Sequence[int] = ()
    """Depths below the first row: 1 for its children."""
    overrides: LogitOverrides | None = None
    """Prepared overrides, kept from round to round; None: prepared when needed."""
    masks: Masks | None = None
    """Grammar masks of all rows, if the text must match a grammar."""

    @property
    def rows(self) -> int:
        return 1 + len(self.tokens)

    @property
    def noise_span(self) -> tuple[int, int, int] | None:
        """Seed, first position and number of positions of the noise needed; None at temperature 0."""
        if is_greedy(self.parameters):
            return None
        return self.seed, self.position, 1 + max(self.depths, default=0)

    @property
    def before(self) -> RowContext:
        """The text before the choice of the first row."""
        ends = *self.eos, *self.parameters.stop_token_ids
        return RowContext(self.counts, self.path, self.generated, ends)

    def paths(self) -> list[tuple[int, ...]]:
        """Tokens of each row after the counted output."""
        paths = [self.path]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append((*paths[1 + parent], token))
        return paths

    def split(self) -> "list[SamplingRows]":
        """Split into single rows."""
        if not self.tokens:
            return [self]
        first = self._replace(tokens=(), parents=(), depths=())
        return [
            first._replace(
                position=self.position + depth,
                generated=self.generated + depth,
                path=path,
                masks=None if self.masks is None else self.masks[row : row + 1],
            )
            for row, (depth, path) in enumerate(zip((0, *self.depths), self.paths(), strict=True))
        ]
