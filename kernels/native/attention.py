"""Tree attention on CPUs in float32, by the compiled kernel: one call a layer for all requests of a batch.

A row's result is the same to the bit alone and in any batch, with any number of threads, and whether its
ancestors are tree slots or part of the prefix. Knows how a batch is handed to C; knows no model, no request.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.kernels.batch import Batch, RequestRows, build_batch
from ssd_serve.kernels.native.library import POINTER, SIZE, NativeLibrary
from ssd_serve.kernels.reference import ReferenceAttention


class _Batch(ctypes.Structure):
    """`batch` in attention.c: the batch's own arrays, and the sizes of the model."""

    _fields_ = (
        ("requests", SIZE),
        ("heads", SIZE),
        ("kv_heads", SIZE),
        ("head_dim", SIZE),
        ("slots", SIZE),
        ("ancestry_words", SIZE),
        ("threads", SIZE),
        ("positions", POINTER),
        ("request_offsets", POINTER),
        ("prefix_slots", POINTER),
        ("prefix_offsets", POINTER),
        ("tree_slots", POINTER),
        ("tree_offsets", POINTER),
        ("tree_positions", POINTER),
        ("ancestry", POINTER),
        ("scratch", POINTER),
        ("scratch_size", SIZE),
    )


@dataclass(frozen=True, slots=True)
class NativePlan:
    """One forward, as the kernel reads it."""

    at: int
    """Address of the struct."""
    write_slots_at: int
    """Address of int64 [rows]."""
    rows: int
    kept: tuple[object, ...]
    """Whatever the struct points into, and the struct."""


class NativeAttention:
    """`AttentionBackend` for a float32 cache on the CPU; all layers have one shape, windows may differ.

    `heads` is the number of query heads. Not to be run by two threads at a time: they would share memory.
    """

    def __init__(self, library: NativeLibrary, cache: KVCache, heads: int) -> None:
        self._attend = library.function("ssd_attend", POINTER, SIZE, POINTER, SIZE, POINTER, POINTER, POINTER)
        self._store = library.function(
            "ssd_store_keys_values", POINTER, POINTER, SIZE, SIZE, POINTER, POINTER
        )
        self._scratch_size = library.function("ssd_attention_scratch", POINTER, result=SIZE)
        self._cache = cache
        self._heads = heads
        self._kv_heads, self._head_dim = cache.layout.layers[0].heads, cache.layout.layers[0].head_dim
        self._windows = [layer.window or 0 for layer in cache.layout.layers]
        self._keys_at = [cache.keys(layer).data_ptr() for layer in range(len(self._windows))]
        self._values_at = [cache.values(layer).data_ptr() for layer in range(len(self._windows))]
        self._scratch = torch.empty(0)

    @property
    def dtype(self) -> torch.dtype:
        """The cache's, and that of queries and results."""
        return torch.float32

    def plan(self, batch: Batch) -> NativePlan:
        """Hand the batch's arrays over; nothing is copied that has the right type already."""
        arrays = (
            np.ascontiguousarray(batch.positions, np.int64),
            np.ascontiguousarray(batch.request_offsets, np.int32),
            np.ascontiguousarray(batch.prefix_slots, np.int32),
            np.ascontiguousarray(batch.prefix_offsets, np.int32),
            np.ascontiguousarray(batch.tree_slots, np.int32),
            np.ascontiguousarray(batch.tree_offsets, np.int32),
            np.ascontiguousarray(batch.tree_positions, np.int64),
            np.ascontiguousarray(batch.ancestry, np.uint64),
        )
        threads = torch.get_num_threads()
        struct = _Batch(
            batch.requests,
            self._heads,
            self._kv_heads,
            self._head_dim,
            self._cache.slots,
            batch.ancestry.shape[1],
            threads,
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

    def write(self, layer: int, keys_values: torch.Tensor, plan: NativePlan) -> None:
        """Store keys and values of all rows: [rows, 2 * kv_heads, head_dim]."""
        rows = _rows(keys_values)
        self._store(
            plan.at,
            rows.data_ptr(),
            rows.stride(0),
            plan.rows,
            plan.write_slots_at,
            self._keys_at[layer],
        )

    def run(self, layer: int, queries: torch.Tensor, plan: NativePlan) -> torch.Tensor:
        """Attend: float32 [rows, heads, head_dim] -> [rows, heads * head_dim]."""
        queries = _rows(queries)
        result = queries.new_empty((queries.shape[0], self._heads * self._head_dim))
        self._attend(
            plan.at,
            self._windows[layer],
            queries.data_ptr(),
            queries.stride(0),
            self._keys_at[layer],
            self._values_at[layer],
            result.data_ptr(),
        )
        return result


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """The tensor [rows, heads, head_dim] with every row in one piece; copied only if it is not."""
    head_dim = heads.shape[2]
    return heads if heads.stride()[1:] == (head_dim, 1) else heads.contiguous()


def can_attend(library: NativeLibrary) -> bool:
    """Whether the kernel does what the contract says, on a small tree beside a prompt chunk."""
    generator = torch.Generator().manual_seed(0)
    layout = KVLayout((LayerKV(2, 64), LayerKV(2, 64, 5)), torch.float32)
    ours, theirs = KVCache(layout, 64, "cpu"), KVCache(layout, 64, "cpu")
    fast, slow = NativeAttention(library, ours, 6), ReferenceAttention(theirs)
    tree = RequestRows(
        [0] * 4, [19, 20, 20, 21], [3, 50, 7, 20], np.arange(24, 43, dtype=np.int32), [], [1, 3, 5, 11]
    )
    chunk = RequestRows([0] * 8, list(range(8)), list(range(8, 16)), np.arange(0, dtype=np.int32), [])
    batch = build_batch([tree, chunk])
    plan = fast.plan(batch)
    right = True
    for layer in range(len(layout.layers)):
        for cache in (ours, theirs):
            data = torch.randn((64, 4, 64), generator=generator.manual_seed(layer))
            cache.write(layer, torch.arange(64), data)
        rows = torch.randn((batch.rows, 10, 64), generator=generator)
        queries, keys_values = rows[:, :6], rows[:, 6:]
        fast.write(layer, keys_values, plan)
        slow.write(layer, keys_values, batch)
        expected = slow.run(layer, queries, batch)
        right = right and torch.allclose(fast.run(layer, queries, plan), expected, rtol=1e-4, atol=1e-5)
    return right
