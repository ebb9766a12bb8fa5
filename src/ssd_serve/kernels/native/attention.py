"""Tree attention on CPUs, by the compiled kernel: one call a layer for all requests of a batch.

Computes in float32. The cache is in float32 or bf16, which halves its memory and what long contexts read.

A row's result is the same to the bit alone and in any batch, with any number of threads. It does not matter
whether its ancestors are tree slots or part of the prefix. Knows how a batch is handed to C; knows no model,
no request.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from ssd_serve.base.errors import UserError
from ssd_serve.cache.kv import KVCache
from ssd_serve.kernels.attention.contract import AttentionFactory, BackendContext, Maker
from ssd_serve.kernels.batch import Batch
from ssd_serve.kernels.native.library import POINTER, SIZE, NativeLibrary

_SIZES = ("requests", "heads", "kv_heads", "head_dim", "slots", "ancestry_words", "threads", "kv_bytes")
_ARRAYS = {
    "positions": np.int64,
    "request_offsets": np.int32,
    "prefix_slots": np.int32,
    "prefix_offsets": np.int32,
    "tree_slots": np.int32,
    "tree_offsets": np.int32,
    "tree_positions": np.int64,
    "ancestry": np.uint64,
}
"""Arrays of a batch with their types in C."""


class _Batch(ctypes.Structure):
    """`batch` in attention.c: the sizes of the model, and the batch's own arrays."""

    _fields_ = (
        *((name, SIZE) for name in _SIZES),
        *((name, POINTER) for name in _ARRAYS),
        ("scratch", POINTER),
        ("scratch_size", SIZE),
    )


@dataclass(frozen=True, slots=True)
class NativePlan:
    """Plan of a forward, as the kernel reads it."""

    at: int
    """Address of the struct."""
    write_slots_at: int
    """Address of int64 [rows]."""
    rows: int
    kept: tuple[object, ...]
    """Objects that must live as long as the struct."""


class NativeAttention:
    """`AttentionBackend` for a float32 or bf16 cache on the CPU; all layers have one shape, windows may differ.

    Not to be run by two threads at a time: they would share memory.
    """

    def __init__(self, library: NativeLibrary, cache: KVCache, heads: int) -> None:
        self._attend = library.function(
            "ssd_attend", POINTER, SIZE, POINTER, SIZE, POINTER, POINTER, POINTER, POINTER
        )
        self._store = library.function(
            "ssd_store_keys_values", POINTER, POINTER, SIZE, SIZE, POINTER, POINTER
        )
        self._scratch_size = library.function("ssd_attention_scratch", POINTER, result=SIZE)
        self.library = library
        self._cache = cache
        self.heads = heads
        self.kv_heads, self.head_dim = cache.layout.layers[0].heads, cache.layout.layers[0].head_dim
        self._windows = [layer.window or 0 for layer in cache.layout.layers]
        self._keys_at = [cache.keys(layer).data_ptr() for layer in range(len(self._windows))]
        self._values_at = [cache.values(layer).data_ptr() for layer in range(len(self._windows))]
        self._scratch = torch.empty(0)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def places(self, layer: int) -> tuple[int, int, int]:
        """Return the addresses of a layer's keys and values, and its window (0: none)."""
        return self._keys_at[layer], self._values_at[layer], self._windows[layer]

    def plan(self, batch: Batch) -> NativePlan:
        """Hand the batch's arrays over; nothing is copied that has the right type already."""
        arrays = [np.ascontiguousarray(getattr(batch, name), kind) for name, kind in _ARRAYS.items()]
        threads = torch.get_num_threads()
        struct = _Batch(
            batch.requests,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self._cache.slots,
            batch.ancestry.shape[1],
            threads,
            self._cache.layout.dtype.itemsize,
            *(array.ctypes.data for array in arrays),
        )
        at = ctypes.addressof(struct)
        size = int(self._scratch_size(at))
        if self._scratch.numel() < size * threads:
            self._scratch = torch.empty(size * threads)
        struct.scratch, struct.scratch_size = self._scratch.data_ptr(), size
        write_slots = np.ascontiguousarray(batch.write_slots, np.int64)
        kept = (struct, arrays, write_slots, self._scratch)
        return NativePlan(at, write_slots.ctypes.data, batch.rows, kept)

    def write(self, layer: int, stored: torch.Tensor, plan: NativePlan) -> None:
        rows = _rows(stored.float())
        keys_at = self._keys_at[layer]
        self._store(plan.at, rows.data_ptr(), rows.stride(0), plan.rows, plan.write_slots_at, keys_at)

    def run(self, layer: int, queries: torch.Tensor, plan: NativePlan) -> torch.Tensor:
        return self._run(layer, queries, plan, None)

    def run_with_lse(
        self, layer: int, queries: torch.Tensor, plan: NativePlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.empty(queries.shape[:2])
        return self._run(layer, queries, plan, lse), lse

    def _run(
        self, layer: int, queries: torch.Tensor, plan: NativePlan, lse: torch.Tensor | None
    ) -> torch.Tensor:
        dtype, queries = queries.dtype, _rows(queries.float())
        result = queries.new_empty((queries.shape[0], self.heads * self.head_dim))
        self._attend(
            plan.at,
            self._windows[layer],
            queries.data_ptr(),
            queries.stride(0),
            self._keys_at[layer],
            self._values_at[layer],
            result.data_ptr(),
            None if lse is None else lse.data_ptr(),
        )
        return result.to(dtype)


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """The tensor [rows, heads, head_dim] with every row in one piece; copied only if it is not."""
    head_dim = heads.shape[2]
    return heads if heads.stride()[1:] == (head_dim, 1) else heads.contiguous()


def _maker(context: BackendContext) -> Maker:
    def make(cache: KVCache, heads: int) -> NativeAttention:
        if context.native is None:
            raise UserError("there are no compiled kernels")
        return NativeAttention(context.native, cache, heads)

    return make


def _missing(cache: KVCache, context: BackendContext) -> str:
    shapes = {(layer.heads, layer.head_dim) for layer in cache.layout.layers}
    on_cpu = cache.device.type == "cpu" and cache.layout.dtype in (torch.float32, torch.bfloat16)
    if context.native is not None and on_cpu and len(shapes) == 1 and cache.layout.order == "heads":
        return ""
    return (
        "it needs a CPU, a C compiler on the PATH and SSD_NATIVE_KERNELS=true; "
        "use SSD_TREE_DECODE_BACKEND=auto or sdpa"
    )


FACTORY = AttentionFactory(_maker, _missing, rows_alone=True)
