"""Tensor parallelism: each rank's share of a model, and the collective operations of a forward.

Every rank has whole layers with fewer heads and a narrower feed-forward part; sums over ranks make a block's
result whole again. Vocabulary and embedding are split by tokens. Where there are fewer key-value heads than
ranks, neighbouring ranks hold the same one. Ranks use torch's process groups: gloo between CPUs, NCCL (RCCL on ROCm)
between GPUs. Both stay on this machine: gloo listens on loopback alone, and ranks find each other through a file.
Not yet run on GPUs. Knows no checkpoint.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from ssd_serve.base.errors import RankLostError, UserError

MAX_RANKS = 8
PATIENCE_S = 30.0
"""Ranks do the same work at the same time: one that comes this much later than the others hangs."""
_LOADING = timedelta(days=1)
"""Practically unlimited: the launcher ends all ranks when one dies."""


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


class Group:
    """The ranks that share one model, as one of them sees them; this base class is a model on one rank.

    All ranks make the same calls in the same order. Raises `RankLostError` where another rank has died or does
    not come.
    """

    @property
    def parallel(self) -> Parallel:
        """This rank, and the number of ranks."""
        return Parallel()

    def add(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' `rows` on every rank; it may be written in place."""
        return rows

    def gather(self, share: torch.Tensor, whole: int) -> torch.Tensor:  # noqa: ARG002 (of other groups)
        """Return all ranks' columns [rows, whole] on rank 0; other ranks get nothing of use.

        Every rank gives its `nearly_even` share of the columns.
        """
        return share

    def agree(self, yes: bool) -> bool:
        """Return True if all ranks pass True."""
        return yes

    def meet(self) -> None:
        """Return when all ranks are here, however long they take: they load at different speeds."""

    def quiesce(self) -> None:
        """Return when no thread polls work of earlier calls.

        During a capture such polling makes ROCm end the process.
        """


class TorchGroup(Group):
    """`Group` over a process group. `ordered`: sums are added in the order of the ranks, so that they do not
    depend on how many rows there are, at the price of moving more numbers."""

    def __init__(
        self, processes: Any, store: Any, parallel: Parallel, device: str, *, ordered: bool = False
    ) -> None:
        self._processes = processes
        self._store = store
        self._parallel = parallel
        self._device = device
        self._ordered = ordered
        # On the stream of the forward: one of their own would be forked and joined for every sum.
        typed = cast(Any, dist).distributed_c10d  # torch does not type all of them
        self._sum, self._everywhere = typed.AllreduceOptions(), typed.AllgatherOptions()
        self._to_first = typed.GatherOptions()
        self._sum.asyncOp = self._everywhere.asyncOp = self._to_first.asyncOp = False
        self._to_first.rootRank = 0
        self._meetings = 0

    @property
    def parallel(self) -> Parallel:
        return self._parallel

    def add(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.contiguous()
        if not self._ordered:
            self._wait(lambda: self._processes.allreduce([rows], self._sum))
            return rows
        shares = [torch.empty_like(rows) for _ in range(self._parallel.size)]
        self._wait(lambda: self._processes.allgather([shares], [rows], self._everywhere))
        total = shares[0]
        for share in shares[1:]:
            total += share
        return total

    def gather(self, share: torch.Tensor, whole: int) -> torch.Tensor:
        """Pad all shares to the widest for the transfer."""
        size = self._parallel.size
        widths = [_length(Parallel(rank, size).nearly_even(whole)) for rank in range(size)]
        sent = share.new_zeros((len(share), max(widths)))
        sent[:, : share.shape[1]] = share
        first = self._parallel.rank == 0
        received = [torch.empty_like(sent) for _ in range(size)] if first else []
        targets = [received] if first else []
        self._wait(lambda: self._processes.gather(targets, [sent], self._to_first))
        if not first:
            return share
        return torch.cat([each[:, :width] for each, width in zip(received, widths, strict=True)], 1)

    def agree(self, yes: bool) -> bool:
        votes = torch.tensor([float(yes)], device=self._device)
        self._wait(lambda: self._processes.allreduce([votes], self._sum))
        return votes.item() == self._parallel.size

    def meet(self) -> None:
        """Through the store: sums have no such patience."""
        names = [f"met/{self._meetings}/{rank}" for rank in range(self._parallel.size)]
        self._meetings += 1
        self._store.set(names[self._parallel.rank], "")
        self._store.wait(names, _LOADING)

    def quiesce(self) -> None:
        """NCCL's watchdog asks for the end of every sum that was not captured."""
        if self._device != "cpu":
            self._processes._wait_for_pending_works()

    def _wait(self, start: Callable[[], Any]) -> None:
        try:
            work = start()
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise RankLostError(
                f"rank {self._parallel.rank} of the target lost another: {str(error).splitlines()[0]}"
            ) from error


def join_group(
    store: Path,
    parallel: Parallel,
    device: str,
    *,
    ordered: bool = False,
    patience_s: float = PATIENCE_S,
) -> TorchGroup:
    """Meet the other ranks through the file `store`, which must not have been used before.

    `device` is this rank's, as torch names it. Returns when all are there; raises `RankLostError`.
    """
    meeting = cast(Any, dist).FileStore(str(store), parallel.size)
    make = _gloo if device == "cpu" else _nccl
    try:
        processes = make(meeting, parallel, device, timedelta(seconds=patience_s))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RankLostError(f"the ranks of the target did not meet: {reason}") from error
    return TorchGroup(processes, meeting, parallel, device, ordered=ordered)


def _gloo(store: Any, parallel: Parallel, _device: str, patience: timedelta) -> Any:
    """Not through `init_process_group`: that would listen on the address that this machine's name has."""
    gloo = cast(Any, dist).ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = patience
    return gloo(store, parallel.rank, parallel.size, options)


def _nccl(store: Any, parallel: Parallel, device: str, patience: timedelta) -> Any:
    place = torch.device(device)
    torch.cuda.set_device(place)
    dist.init_process_group(
        "nccl",
        store=store,
        rank=parallel.rank,
        world_size=parallel.size,
        timeout=patience,
        device_id=place,
    )
    return cast(Any, dist.group).WORLD


def _length(part: slice) -> int:
    return int(part.stop - part.start)
