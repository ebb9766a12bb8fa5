"""Tensor parallelism: each rank's share of a model, and the collective operations of a forward.

Every rank has whole layers with fewer heads and a narrower feed-forward part; sums over ranks make a block's
result whole again. Vocabulary and embedding are split by tokens. Where there are fewer key-value heads than
ranks, neighbouring ranks hold the same one. Knows no transport (`torch_group` is one) and no checkpoint.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from ssd_serve.base.errors import UserError

MAX_RANKS = 8


@dataclass(frozen=True, slots=True)
class Parallel:
    """This rank's place among those that share one model."""

    rank: int = 0
    size: int = 1

    def part(self, length: int) -> slice:
        """This rank's share of a dimension that all ranks split evenly."""
        if length % self.size:
            raise UserError(f"a dimension of {length} cannot be split over {self.size} ranks")
        share = length // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def nearly_even(self, length: int) -> slice:
        """This rank's share of a dimension that is split into shares that may differ by one: the vocabulary."""
        return slice(self.rank * length // self.size, (self.rank + 1) * length // self.size)

    def kv_heads(self, heads: int) -> slice:
        """This rank's share of the key-value heads: some of them, or one that other ranks hold too."""
        if heads >= self.size:
            return self.part(heads)
        own = self.rank * heads // self.size
        return slice(own, own + 1)


class Group(Protocol):
    """The ranks that share one model, as one of them sees them. All ranks make the same calls in the same
    order. Raises `RankLostError` where another rank has died or does not come."""

    @property
    def parallel(self) -> Parallel:
        """This rank, and the number of ranks."""
        ...

    def add(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `rows` on every rank; may be written in place."""
        ...

    def gather(self, share: torch.Tensor, whole: int) -> torch.Tensor:
        """On rank 0 all ranks' columns, [rows, whole]; every rank gives its `nearly_even` share of them.
        Other ranks get nothing of use."""
        ...

    def agree(self, yes: bool) -> bool:
        """Return True if all ranks say yes."""
        ...

    def meet(self) -> None:
        """Return when all ranks are here, however long they take: they load at different speeds."""
        ...

    def quiesce(self) -> None:
        """Return when no thread polls work of earlier calls. During a capture such polling makes ROCm end the
        process."""
        ...


class SingleRank:
    """`Group` of a model that one rank holds."""

    @property
    def parallel(self) -> Parallel:
        """The only one."""
        return Parallel()

    def add(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `rows`."""
        return rows

    def gather(self, share: torch.Tensor, whole: int) -> torch.Tensor:  # noqa: ARG002 of the protocol
        """Return `share`."""
        return share

    def agree(self, yes: bool) -> bool:
        """Return `yes`."""
        return yes

    def meet(self) -> None:
        """Return at once."""

    def quiesce(self) -> None:
        """Return at once."""
