"""Tensors of GGUF files by their Hugging Face names: in their blocks, or widened when they are read.

Query and key rows of Llama files are stored with the halves of a head interleaved; they are read in the order
of the Hugging Face layout. Knows names and blocks; knows no device.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from ssd_serve.base.errors import CheckpointError
from ssd_serve.kernels.native.packed import TYPES, StoredBlocks
from ssd_serve.models.weights.formats import Tensors
from ssd_serve.models.weights.gguf.config import INTERLEAVED, ROPE_FACTORS, architecture_of
from ssd_serve.models.weights.gguf.file import GgufFile, StoredTensor, files_of

_DTYPES = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
_BLOCKS = tuple(Kind[name] for name in TYPES)
"""Types that are widened here."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_WHOLE = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": "model.norm.weight",
    "output.weight": HEAD,
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WIDENED_AT_ONCE = 1 << 22
"""Numbers of a matrix that are widened in one step, which bounds the memory for intermediate results."""

Rows = npt.NDArray[np.intp] | slice


class GgufTensors:
    """`Tensors` of one file. `heads`: number of interleaved heads, by kind of tensor (`attn_q`, `attn_k`)."""

    def __init__(self, file: GgufFile, heads: Mapping[str, int]) -> None:
        """Raise `CheckpointError` for tensors of a type that is not built."""
        for each in file.tensors.values():
            if each.kind not in (*_DTYPES, *_BLOCKS):
                supported = ", ".join(kind.name for kind in (*_DTYPES, *_BLOCKS))
                raise CheckpointError(
                    f"{file.path}: {each.name} is {each.kind.name}, which is not built; built are {supported}"
                )
        self._file = file
        self._heads = heads
        self._stored = {
            _hugging_face_name(name): each for name, each in file.tensors.items() if name != ROPE_FACTORS
        }

    def names(self) -> list[str]:
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def read(self, name: str, rows: slice, columns: slice | None) -> torch.Tensor:
        stored = self._stored[name]
        if len(stored.shape) == 1:
            return self._widen(stored).view(-1)[rows]
        numbers = self._widen(stored, self._chosen(stored, rows))
        return numbers if columns is None else numbers[:, columns]

    def kind(self, name: str) -> str:
        """Return the type of a tensor as GGUF names it."""
        return self._stored[name].kind.name

    def nbytes(self, name: str) -> int:
        """Return the bytes of a tensor in the file."""
        stored = self._stored[name]
        return prod(stored.shape[:-1]) * stored.row_bytes

    def blocks(self, name: str, rows: slice, columns: slice | None) -> StoredBlocks | None:
        """Return some outputs of a matrix in its blocks; None for columns that end within a block."""
        stored = self._stored[name]
        numbers, size = GGML_QUANT_SIZES[stored.kind]
        start, stop, _ = (columns or slice(None)).indices(stored.shape[-1])
        if start % numbers or stop % numbers:
            return None
        data = self._file.rows(stored)[self._chosen(stored, rows)]
        return StoredBlocks(stored.kind.name, data[:, start // numbers * size : stop // numbers * size])

    def _chosen(self, stored: StoredTensor, rows: slice) -> Rows:
        """Return the stored rows that are rows of the Hugging Face layout."""
        heads = self._heads.get(stored.name.split(".")[-2])
        return _halves_apart(stored.shape[0], heads)[rows] if heads else rows

    def _widen(self, stored: StoredTensor, rows: Rows = slice(None)) -> torch.Tensor:
        """Read some rows of a tensor [rows, numbers], in the file's dtype or in float32 for blocks."""
        data = self._file.rows(stored)[rows]
        if (dtype := _DTYPES.get(stored.kind)) is not None:
            return torch.from_numpy(data.copy()).view(dtype)
        return widened(StoredBlocks(stored.kind.name, data), stored.shape[-1])


def open_tensors(path: Path, stack: ExitStack) -> dict[str, Tensors]:
    """Open all files of a model; return the file of each tensor. `stack` closes them."""
    files = [stack.enter_context(GgufFile(each)) for each in files_of(path)]
    metadata = files[0].metadata
    architecture = architecture_of(metadata)
    heads = {} if architecture not in INTERLEAVED else _heads(architecture, metadata)
    found: dict[str, Tensors] = {}
    for file in files:
        tensors = GgufTensors(file, heads)
        found.update(dict.fromkeys(tensors.names(), tensors))
    return found


def _heads(architecture: str, metadata: Mapping[str, int]) -> dict[str, int]:
    queries = metadata[f"{architecture}.attention.head_count"]
    return {"attn_q": queries, "attn_k": metadata.get(f"{architecture}.attention.head_count_kv", queries)}


def _halves_apart(rows: int, heads: int) -> npt.NDArray[np.intp]:
    """Return the stored row of each row of the Hugging Face layout: int [rows]."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def widened(stored: StoredBlocks, inputs: int) -> torch.Tensor:
    """Return the weights of a matrix in its blocks: float32 [outputs, inputs]."""
    wide = np.empty((len(stored.blocks), inputs), np.float32)
    step = max(1, _WIDENED_AT_ONCE // inputs)
    for start in range(0, len(wide), step):
        wide[start : start + step] = dequantize(stored.blocks[start : start + step], Kind[stored.kind])
    return torch.from_numpy(wide)


def _hugging_face_name(name: str) -> str:
    """Return the Hugging Face name of a tensor; a name that is not known is returned as it is."""
    if name in _WHOLE:
        return _WHOLE[name]
    match name.split("."):
        case ["blk", layer, block, kind] if block in _LAYER:
            return f"model.layers.{layer}.{_LAYER[block]}.{kind}"
        case _:
            return name
