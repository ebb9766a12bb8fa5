"""A checkpoint's tensors compared with what a reader asks for, before any is read.

All that is missing, misshapen or not known is named at once, with its shape.
"""

from collections.abc import Sequence

import torch

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.ranks.parallel import Parallel
from ssd_serve.models.weights.checkpoint import Checkpoint, shorten
from ssd_serve.models.weights.linear import DenseLinear, Linear, MatrixShare

_Shape = tuple[int, ...]


class Survey:
    """`Linears` that notes what is asked for and gives tensors without numbers."""

    def __init__(self, checkpoint: Checkpoint, parallel: Parallel) -> None:
        self._checkpoint = checkpoint
        self._parallel = parallel
        self._asked: dict[str, _Shape] = {}

    @property
    def parallel(self) -> Parallel:
        return self._parallel

    def tensor(self, name: str, shape: _Shape) -> torch.Tensor:
        self._asked[name] = shape
        return torch.empty(shape, device="meta")

    def embedding(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        return self.tensor(name, shape)

    def by_outputs(self, parts: Sequence[MatrixShare], inputs: int, *, bias: bool) -> Linear:
        for part in parts:
            self.by_inputs(part, inputs, bias=bias)
        return self.wrap(torch.empty((0, inputs), device="meta"))

    def by_inputs(self, part: MatrixShare, inputs: int, *, bias: bool) -> Linear:
        if bias:
            self.tensor(f"{part.name}.bias", (part.outputs,))
        return self.wrap(self.tensor(f"{part.name}.weight", (part.outputs, inputs)))

    def wrap(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return DenseLinear(weight, bias)

    def finish(self) -> None:
        """Raise `CheckpointError` where the file's tensors are not those that were asked for."""
        file, asked = self._checkpoint, self._asked
        missing = [f"{name} {list(shape)}" for name, shape in asked.items() if name not in file]
        misshapen = [
            f"{name} {list(found)} instead of {list(shape)}"
            for name, shape in asked.items()
            if name in file and (found := file.shape(name)) != shape
        ]
        # What belongs to a matrix that was asked for, such as its scales, is checked when that is read.
        parents = {name.rpartition(".")[0] for name in asked}
        others = [
            f"{name} {list(file.shape(name))}"
            for name in file.unread()
            if name not in asked and name.rpartition(".")[0] not in parents
        ]
        told = {"lacks": missing, "has misshapen": misshapen, "has unknown": others}
        if problems := [f"{what} {shorten(names)}" for what, names in told.items() if names]:
            raise CheckpointError(
                f"{file.folder} does not hold what its config.json describes: it {', it '.join(problems)}"
            )
