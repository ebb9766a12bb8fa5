"""Weight formats: how a model is stored on disk, one line each. Free of torch, so that servers may import it.

A format recognises a path, reads its configuration and tokenizer, opens its tensors by name, and knows the
layout in which its matrices are kept in memory and multiplied. Knows no architecture.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.config import Json

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer as Backend

    from ssd_serve.kernels.native.library import NativeLibrary
    from ssd_serve.models.weights.checkpoint import Checkpoint
    from ssd_serve.models.weights.linear import Linear
    from ssd_serve.models.weights.quantization import Fp8Scheme

FORMATS: dict[str, str] = {
    "safetensors": "ssd_serve.models.weights.huggingface:SAFETENSORS",
    "gguf": "ssd_serve.models.weights.gguf.format:GGUF",
    "pickle": "ssd_serve.models.weights.huggingface:PICKLE",
    "medusa": "ssd_serve.models.weights.huggingface:MEDUSA",
    "medusa pickle": "ssd_serve.models.weights.huggingface:MEDUSA_PICKLE",
    "hydra pickle": "ssd_serve.models.weights.huggingface:HYDRA_PICKLE",
}
"""Path of each `WeightFormat`, `module:name`. The first one that recognises a path reads it."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """Tokenizer as a format stores it."""

    backend: "Backend"
    special: Mapping[str, str]
    """Named special tokens (`bos_token`, ...)."""
    chat_templates: Mapping[str, str]
    """Sources of the chat templates by name; none: there are none."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a text, from the model's configuration."""


class Tensors(Protocol):
    """An open file of weights."""

    def names(self) -> Sequence[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, rows: slice, columns: slice | None) -> "torch.Tensor":
        """Read some rows, or some columns of them, on the CPU, in the file's dtype or as packed bytes."""
        ...


class StoredMatrix(Protocol):
    """A matrix, or a rank's share of one, as it is stored in the file."""

    @property
    def outputs(self) -> int: ...

    def reordered(self, order: "torch.Tensor") -> "StoredMatrix":
        """Return it with its outputs in another order."""
        ...

    def write(self, target: "torch.Tensor") -> None:
        """Write the weights to `target` [outputs, inputs], rounded once, to its dtype."""
        ...


class Matrices(Protocol):
    """The tensors of one checkpoint, in the units that models ask for."""

    def plain(self, name: str, shape: tuple[int, ...], rows: slice = ...) -> "torch.Tensor":
        """Read a tensor that no product uses (norm, embedding), or some of its rows, in a wide dtype."""
        ...

    def read(
        self, name: str, shape: tuple[int, int], *, rows: slice = ..., columns: slice | None = ...
    ) -> StoredMatrix:
        """Read the matrix `name`.weight or a slice of it. `shape` is that of the whole matrix."""
        ...

    def product(self, parts: "Sequence[Any]", bias: "torch.Tensor | None", device: str) -> "Linear | None":
        """Keep matrices that share their input in the format's own layout, fused; None: they are widened."""
        ...

    def saved(self, device: str, dtype: "torch.dtype") -> int:
        """Return how many bytes less than in `dtype` all matrices take on this device. Reads no weights."""
        ...


class WeightFormat(Protocol):
    """Contract of a weight format."""

    def recognises(self, path: Path) -> bool:
        """Return True if this format can read the file or folder."""
        ...

    def config(self, path: Path) -> tuple[Json, Json]:
        """Return `config.json` and `generation_config.json` (empty without one), or what stands for them."""
        ...

    def tokenizer(self, path: Path) -> TokenizerParts:
        """Return the tokenizer and the chat template. Raises `CheckpointError`."""
        ...

    def open(self, path: Path, stack: ExitStack, *, allow_pickle: bool) -> Mapping[str, Tensors]:
        """Return the open file of each tensor, by Hugging Face names; `stack` closes files."""
        ...

    def matrices(
        self, checkpoint: "Checkpoint", scheme: "Fp8Scheme | None", native: "NativeLibrary | None" = None
    ) -> Matrices:
        """Return the reader of matrices; `scheme` is the configuration of fp8 scales, `native` the compiled
        kernels where matrices may stay packed on CPUs."""
        ...

    def multiplies(self, scheme: "Fp8Scheme | None", device: str) -> bool:
        """Return True if matrices may keep a layout of their own on this device."""
        ...


def format_of(path: Path) -> WeightFormat:
    """Return the format of a model. Raises `CheckpointError` for a path that no format reads."""
    if (found := recognised(path)) is not None:
        return found
    if path.is_dir():  # without weights it may still have a configuration or a tokenizer
        first: WeightFormat = resolve_name(FORMATS["safetensors"])
        return first
    raise CheckpointError(
        f"{path} is not a folder; a model is a GGUF file or a folder in the Hugging Face layout"
        if not path.exists()
        else f"{path} is not a folder, nor a file of weights in a format that is known ({', '.join(FORMATS)})"
    )


def recognised(path: Path) -> WeightFormat | None:
    """Return the first format that can read a path, None without one."""
    formats: Sequence[WeightFormat] = [resolve_name(each) for each in FORMATS.values()]
    return next((each for each in formats if each.recognises(path)), None)


def read_config(path: Path) -> Json:
    """Return the `config.json` of a model, or what stands for it."""
    return format_of(path).config(path)[0]


def damaged_file(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a file of weights that cannot be read."""
    return CheckpointError(f"{path} is damaged or half downloaded ({error}); delete it and get it again")
