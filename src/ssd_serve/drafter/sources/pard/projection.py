"""The projection of a PARD-2 draft, from its target's outputs to vectors that are added to embeddings."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from ssd_serve.base.errors import CheckpointError
from ssd_serve.drafter.sources.pard.config import PardConfig
from ssd_serve.models.weights.checkpoint import Checkpoint, open_shards
from ssd_serve.models.weights.formats import Tensors, read_config

_FILES = ("warp_model.safetensors", "warp_model.bin")
_NAME = "target_proj"


@dataclass(frozen=True, slots=True)
class Projection:
    """A matrix [hidden, width] and a bias, times the draft's factor."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def width(self) -> int:
        """Numbers of the target's outputs at one position."""
        return self.weight.shape[1]

    @torch.inference_mode()
    def __call__(self, outputs: torch.Tensor) -> torch.Tensor:
        """Map the target's outputs [rows, width] to [rows, hidden]."""
        return functional.linear(outputs.to(self.weight), self.weight, self.bias)

    def zeros(self) -> torch.Tensor:
        """Return the vector of a row without outputs: [1, hidden]."""
        return self(self.weight.new_zeros((1, self.width)))


def read_projection(
    folder: Path, config: PardConfig, *, device: str, dtype: torch.dtype, allow_pickle: bool
) -> Projection:
    """Read it from its own file, or from the model's weights. Raises `CheckpointError`."""
    hidden = int(read_config(folder)["hidden_size"])
    with ExitStack() as stack:
        name = next((each for each in _FILES if (folder / each).is_file()), None)
        if name is not None:
            files = open_shards(folder, (name, f"{name}.index.json"), stack, allow_pickle=allow_pickle)
        else:
            whole = stack.enter_context(Checkpoint(folder, allow_pickle=allow_pickle, partly=True))
            files = {each: whole.file(each) for each in whole.names()}
        weight = _read(folder, files, "weight", (hidden, config.width))
        bias = _read(folder, files, "bias", (hidden,)) if config.bias else None
    scale = config.scale
    bias = None if bias is None else (scale * bias).to(device, dtype)
    return Projection((scale * weight).to(device, dtype), bias)


def _read(folder: Path, files: Mapping[str, Tensors], part: str, shape: tuple[int, ...]) -> torch.Tensor:
    name = f"{_NAME}.{part}"
    if name not in files:
        raise CheckpointError(f"{folder} lacks {name}: it is in none of {', '.join(_FILES)} and the weights")
    if (found := files[name].shape(name)) != shape:
        raise CheckpointError(f"{folder}: {name} has shape {list(found)}, config.json says {list(shape)}")
    return files[name].read(name, slice(None), None).float()
