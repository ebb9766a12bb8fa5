"""Data-parallel training: each process of `torchrun` computes its rows of every batch."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as processes
from torch import Tensor, nn
from torch.distributed.distributed_c10d import get_node_local_rank

from ssd_serve.base.errors import UserError


@dataclass(frozen=True)
class TrainingProcess:
    """The rank of this process among `count` processes of a training."""

    number: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """True for the process that reports, saves checkpoints and exports."""
        return self.number == 0

    def rows(self, whole: Tensor) -> Tensor:
        """Return this process's rows of a batch [rows, ...]."""
        return whole[self.number :: self.count]

    def check(self, rows: int) -> None:
        """Raise `UserError` if `rows` cannot be shared evenly."""
        if rows % self.count:
            raise UserError(f"{self.count} processes cannot share {rows} rows evenly: choose other --rows")

    def mean(self, model: nn.Module, loss: Tensor) -> Tensor:
        """Replace the gradients by their mean over all processes; return the mean loss."""
        if self.count == 1:
            return loss
        found = [each.grad for each in model.parameters() if each.grad is not None]
        together = torch.cat([*(each.flatten().float() for each in found), loss.detach().float().view(1)])
        processes.all_reduce(together)
        together /= self.count
        start = 0
        for gradient in found:
            gradient.copy_(together[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()
        return together[start]

    @contextmanager
    def first_of_all(self) -> Generator[None]:
        """Run a block in the first process before the others run it."""
        if self.count > 1 and not self.first:
            processes.barrier()
        yield
        if self.count > 1 and self.first:
            processes.barrier()


ALONE = TrainingProcess()


@contextmanager
def joined_processes(device: str) -> Generator[tuple[TrainingProcess, str]]:
    """Yield this process and its device; on GPUs, the device of its local rank.

    Yields `ALONE` if `torchrun` has not started this process.
    """
    if not processes.is_torchelastic_launched():
        yield ALONE, device
        return
    on_gpu = device.startswith("cuda")
    processes.init_process_group("nccl" if on_gpu else "gloo")
    if on_gpu:
        device = f"cuda:{get_node_local_rank()}"
        torch.cuda.set_device(device)
    try:
        yield TrainingProcess(processes.get_rank(), processes.get_world_size()), device
    finally:
        processes.destroy_process_group()
