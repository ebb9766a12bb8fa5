"""Counts the bytes that a model will take, before its weights are read, and chooses its dtype.

Knows counts and dtypes; what there is to count the architectures know.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ssd_serve.base.errors import UserError
from ssd_serve.kernels.cpu_products import cpu_has_fast_bf16
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.native.packed import can_multiply_packed
from ssd_serve.kernels.native.products import can_multiply_bf16
from ssd_serve.models.architectures.contract import Description, Sizes
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.parallel import Parallel
from ssd_serve.models.weights.checkpoint import Checkpoint
from ssd_serve.models.weights.formats import format_of
from ssd_serve.models.weights.gguf.format import GGUF
from ssd_serve.models.weights.linear import multiplies_int8
from ssd_serve.models.weights.matrices import MatrixReader
from ssd_serve.models.weights.quantization import Fp8Scheme

INT8, PACKED = "int8", "packed"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, INT8: torch.bfloat16}
"""Dtypes of activations; int8 weights are wider only where this machine has no product for them."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Memory that each rank will need. `description` is the whole model's."""

    description: Description[Any]
    context: int
    """The longest text that the checkpoint knows."""
    read_bytes: int
    """Bytes of the matrices that a forward of one row reads: its cost."""
    resident_bytes: int
    """Bytes of all weights in memory, the embedding included."""
    kv_bytes_per_slot: int


def resolve_dtype(dtype: str, device: str, native: NativeLibrary | None = None) -> str:
    """`fp32`, `bf16`, `fp16` or `int8`; `auto` is bf16 where the device computes it fast, else fp32. A CPU
    does so in hardware, or by the compiled kernels if there are any."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise UserError(f"dtype {dtype!r} is unknown; use auto, {', '.join(DTYPES)}")
        if dtype == INT8 and torch_device(device) != "cpu":
            raise UserError(f"dtype int8 is not built for {device}, only for CPUs; use auto, bf16 or fp16")
        return dtype
    if torch_device(device) != "cpu":
        return "bf16"
    fast = cpu_has_fast_bf16() or (native is not None and can_multiply_bf16(native))
    return "bf16" if fast else "fp32"


def model_dtype(folder: Path, dtype: str, device: str, native: NativeLibrary | None = None) -> str:
    """Return what `resolve_dtype` does, or `packed` where `auto` leaves the weights in the blocks of the file;
    activations are bf16 then."""
    name = resolve_dtype(dtype, device, native)
    stays = dtype == "auto" and torch_device(device) == "cpu" and format_of(folder) is GGUF
    return PACKED if stays and native is not None and can_multiply_packed(native) else name


def activation_dtype(name: str) -> torch.dtype:
    """Return the dtype of the activations of a model by what `model_dtype` names."""
    return torch.bfloat16 if name == PACKED else DTYPES[name]


def kv_dtype(device: str, dtype: torch.dtype, native: NativeLibrary | None) -> torch.dtype:
    """The dtype of the KV cache for activations of `dtype`.

    The same, but on CPUs float32 for what the compiled attention cannot read: torch's attention in half
    precision is slower there, for single rows more than twice.
    """
    narrow = native is not None and dtype is torch.bfloat16
    return dtype if torch_device(device) != "cpu" or narrow else torch.float32


def torch_device(device: str) -> str:
    """The device name for torch: a core list (`cpu:0-1`) is the launcher's business, `cpu` is left of it."""
    return "cpu" if device == "cpu" or device.startswith("cpu:") else device


def model_sizes(
    folder: Path,
    *,
    device: str,
    dtype: str,
    ranks: int = 1,
    allow_pickle: bool = False,
    layers: int | None = None,
    native: NativeLibrary | None = None,
) -> ModelSizes:
    """Sizes of a model that is not loaded, or of its first layers. Raises `UserError` where that many ranks
    cannot share it."""
    description = load_description(folder, layers)
    return sizes_of(
        description, folder, device=device, dtype=dtype, ranks=ranks, allow_pickle=allow_pickle, native=native
    )


def sizes_of(
    description: Description[Any],
    folder: Path,
    *,
    device: str,
    dtype: str,
    ranks: int = 1,
    allow_pickle: bool = False,
    native: NativeLibrary | None = None,
) -> ModelSizes:
    """Return the sizes of a description of what is in `folder`."""
    own = description.sizes(Parallel(ranks - 1, ranks))  # the last one's vocabulary is the largest
    name, place, fp8 = (
        model_dtype(folder, dtype, device, native),
        torch_device(device),
        description.config.fp8,
    )
    kind = activation_dtype(name)
    embedding = separate_embedding(own, place) * kind.itemsize
    if name != PACKED and not format_of(folder).multiplies(fp8, place):
        resident = _matrix_bytes(own, name, native)
    else:
        with Checkpoint(folder, allow_pickle=allow_pickle) as checkpoint:
            kept = checkpoint.format.matrices(checkpoint, fp8, native if name == PACKED else None)
            saved = kept.saved(place, kind)
        everything = load_description(folder).sizes(Parallel()).resident  # `saved` counts all layers
        resident = own.resident * kind.itemsize - saved * own.resident // everything
        if name == PACKED:  # a tied head is the embedding too
            embedding = 0 if own.tied else own.embedding * resident // own.resident
    return ModelSizes(
        description,
        description.config.context,
        resident * own.read // own.resident,
        resident + embedding,
        own.layout(kv_dtype(device, kind, native)).bytes_per_slot,
    )


def separate_embedding(sizes: Sizes, place: str) -> int:
    """Numbers of an embedding that is not the head too. On CPUs the head is packed and cannot be both."""
    return 0 if sizes.tied and place != "cpu" else sizes.embedding


def bytes_saved(
    folder: Path, scheme: Fp8Scheme | None, form: torch.dtype, dtype: torch.dtype, allow_pickle: bool = False
) -> int:
    """Bytes that all matrices of a folder take less than in `dtype` where fp8 is multiplied in the format
    `form`: the files say which of them stay in it."""
    with Checkpoint(folder, allow_pickle=allow_pickle) as checkpoint:
        return MatrixReader(checkpoint, scheme).bytes_saved(form, dtype)


def _matrix_bytes(sizes: Sizes, dtype: str, native: NativeLibrary | None) -> int:
    """Return the bytes of all of one rank's matrices, where none is in fp8."""
    if dtype != INT8:
        return sizes.resident * DTYPES[dtype].itemsize
    width = 1 if multiplies_int8(native) else DTYPES[dtype].itemsize
    return sizes.resident * width + sizes.outputs * torch.float32.itemsize  # a scale for each output
