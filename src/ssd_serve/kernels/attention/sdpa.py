"""Tree attention with torch's scaled_dot_product_attention: works on every device, fast on CPUs.

The context is copied only where necessary. If the prefix and tree slots of a request lie close together, they
are read through a view of the whole span, with the slots of other requests masked. Only scattered slots are
gathered. Masks are made on the host in numpy, once a forward for each distinct window.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from ssd_serve.cache.kv import KVCache
from ssd_serve.kernels.attention.contract import AttentionFactory, CacheAttention
from ssd_serve.kernels.batch import Batch, BoolArray, Int32Array, Int64Array
from ssd_serve.kernels.fixed_rows import threads

_FOLD_ROWS = 32
"""Up to this many rows the query heads of a KV head are stacked as rows, so that K and V are read once."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Request's part of a plan for one window: its context, and what each row may read."""

    rows: slice
    slots: slice | torch.Tensor
    """A span of slots read in place, or the slots to gather: int64 [context]."""
    mask: torch.Tensor
    """Added to the scores: 0 or -inf, [stacked rows, context], in the dtype of the queries."""
    folded: bool


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """Plan of a forward: write slots on the device, and the pieces for each distinct window."""

    write_slots: torch.Tensor  # [rows], int64
    pieces: dict[tuple[int | None, int], list[_Piece]]
    """Pieces by window and number of KV heads."""


class SdpaAttention(CacheAttention):
    """`AttentionBackend` over scaled_dot_product_attention."""

    @property
    def dtype(self) -> torch.dtype:
        return _dtype(self._cache)

    def __init__(self, cache: KVCache, heads: int) -> None:
        super().__init__(cache, heads)
        self._kinds = [(layer.window, layer.heads) for layer in self._layers]

    def plan(self, batch: Batch) -> SdpaPlan:
        """Find each request's context and build its masks."""
        bits = batch.ancestry_bits()
        pieces = {
            kind: [self._piece(batch, request, bits, *kind) for request in range(batch.requests)]
            for kind in dict.fromkeys(self._kinds)
        }
        return SdpaPlan(torch.from_numpy(batch.write_slots).to(self._device), pieces)

    def run(self, layer: int, queries: torch.Tensor, plan: SdpaPlan) -> torch.Tensor:
        pieces = plan.pieces[self._kinds[layer]]
        if len(pieces) == 1:
            return self._attend(layer, queries, pieces[0])
        result = queries.new_empty(queries.shape[0], queries.shape[1] * self._layers[layer].value_dim)
        for piece in pieces:
            result[piece.rows] = self._attend(layer, queries[piece.rows], piece)
        return result

    def run_with_lse(
        self, layer: int, queries: torch.Tensor, plan: SdpaPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionBackend`; torch's operator has no log-sum-exp, so scores are computed once more."""
        keys, pieces = self._cache.keys(layer), plan.pieces[self._kinds[layer]]
        scale = self._layers[layer].scale
        parts = [
            log_sum_exp(queries[piece.rows], keys[:, piece.slots], piece.mask, scale) for piece in pieces
        ]
        return self.run(layer, queries, plan), torch.cat(parts)

    def _attend(self, layer: int, queries: torch.Tensor, piece: _Piece) -> torch.Tensor:
        rows, _, head_dim = queries.shape
        k, v = _read(self._cache, layer, piece.slots, queries.dtype)
        q = queries.transpose(0, 1)  # [heads, rows, head_dim]
        if piece.folded:
            q = q.reshape(k.shape[0], -1, head_dim)  # [kv_heads, group * rows, head_dim]
        out = F.scaled_dot_product_attention(
            q.unsqueeze(0),
            k.unsqueeze(0),
            v.unsqueeze(0),
            attn_mask=piece.mask.to(queries.dtype),
            scale=self._layers[layer].scale,
            enable_gqa=not piece.folded,
        )
        if piece.folded:
            return out.view(k.shape[0], -1, rows, v.shape[2]).permute(2, 0, 1, 3).reshape(rows, -1)
        return out.transpose(1, 2).reshape(rows, -1)

    def _piece(
        self, batch: Batch, request: int, bits: BoolArray, window: int | None, kv_heads: int
    ) -> _Piece:
        group = self._heads // kv_heads
        rows = slice(int(batch.request_offsets[request]), int(batch.request_offsets[request + 1]))
        prefix, tree, seen = _context(batch, request, rows, bits, window)
        low, length, compact = _span(prefix, tree)
        if compact:
            slots: slice | torch.Tensor = slice(low, low + length)
            places = np.concatenate((prefix, tree)) - low
        else:
            slots = torch.from_numpy(np.concatenate((prefix, tree)).astype(np.int64)).to(self._device)
            places = np.arange(length, dtype=np.int32)
        mask = np.full((len(seen), length), -np.inf, dtype=np.float32)
        mask[:, places] = np.where(seen, np.float32(0), np.float32(-np.inf))
        folded = group > 1 and len(mask) <= _FOLD_ROWS
        if folded:
            mask = np.tile(mask, (group, 1))
        return _Piece(rows, slots, torch.from_numpy(mask).to(self._device, self.dtype), folded)


def _read(
    cache: KVCache, layer: int, slots: slice | torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [kv_heads, context, head_dim]: views of a span, or copies of gathered slots."""
    keys, values = cache.keys(layer), cache.values(layer)
    if isinstance(slots, slice):
        return keys[:, slots].to(dtype), values[:, slots].to(dtype)
    return keys.index_select(1, slots).to(dtype), values.index_select(1, slots).to(dtype)


def _dtype(cache: KVCache) -> torch.dtype:
    """Return the dtype of queries: torch computes slower in half precision on CPUs than it widens."""
    return torch.float32 if cache.device.type == "cpu" else cache.layout.dtype


def log_sum_exp(queries: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """[rows, heads] from queries [rows, heads, head_dim], keys [kv_heads, context, head_dim] and a mask of
    at least [rows, context]."""
    rows, heads, head_dim = queries.shape
    grouped = queries.float().reshape(rows, keys.shape[0], -1, head_dim).permute(1, 2, 0, 3)
    # [kv_heads, group, rows, context]
    scores = grouped @ keys.float()[:, None].transpose(2, 3) * scale
    lse = torch.logsumexp(scores + mask[:rows].float(), dim=3)
    return lse.permute(2, 0, 1).reshape(rows, heads)


def _context(
    batch: Batch, request: int, rows: slice, bits: BoolArray, window: int | None
) -> tuple[Int32Array, Int32Array, BoolArray]:
    """Prefix slots within any row's window, tree slots, and which of both each row sees [rows, slots]."""
    prefix = batch.prefix_slots[batch.prefix_offsets[request] : batch.prefix_offsets[request + 1]]
    tree = slice(int(batch.tree_offsets[request]), int(batch.tree_offsets[request + 1]))
    own = bits[rows, : tree.stop - tree.start]  # [rows, tree]
    if window is None:
        before = np.ones((len(own), len(prefix)), dtype=np.bool_)
    else:
        oldest = batch.positions[rows, None] - window  # [rows, 1], the last position out of the window
        first = min(max(0, int(oldest.min()) + 1), len(prefix))
        before = np.arange(first, len(prefix)) > oldest  # [rows, prefix]
        own = own & (batch.tree_positions[tree] > oldest)
        prefix = prefix[first:]
    return prefix, batch.tree_slots[tree], np.concatenate((before, own), axis=1)


def _span(prefix: Int32Array, tree: Int32Array) -> tuple[int, int, bool]:
    """The first slot of the context, its length, and whether it is a span that is read in place."""
    low, high, number = int(tree.min()), int(tree.max()), len(prefix) + len(tree)
    if len(prefix):
        low, high = min(low, int(prefix.min())), max(high, int(prefix.max()))
    span = high - low + 1
    if span <= 1.5 * number + 64:
        return low, span, True
    return low, number, False


@dataclass(frozen=True, slots=True)
class _Context:
    """Slots that some rows see, each a part of them."""

    slots: slice | torch.Tensor
    """A span of slots, or the slots to gather: int64 [context]."""
    rows: tuple[tuple[int, slice], ...]
    """Rows of the batch, and which part of the context each sees."""


@dataclass(frozen=True, slots=True)
class SdpaRowsPlan:
    """Plan of a forward: write slots on the device, and the contexts for each distinct window."""

    write_slots: torch.Tensor  # [rows], int64
    contexts: dict[int | None, list[_Context]]


class SdpaRows(CacheAttention):
    """`AttentionBackend` for unrolled batches: each row has the same bits in any batch.

    The operator's order of additions depends on the number of rows, on the length and, on CPUs, on the number
    of threads. So it gets one row, exactly the context that the row sees, in order of position, and one
    thread. A context is read in place or from a copy that several rows share. On GPUs, where the kernel may
    depend on how the context lies, it is always a copy of its own.
    """

    @property
    def dtype(self) -> torch.dtype:
        return _dtype(self._cache)

    def plan(self, batch: Batch) -> SdpaRowsPlan:
        """Find the rows' contexts, and which of them are parts of others. Raises ValueError for a batch that
        is not unrolled."""
        if not batch.requests == batch.rows == len(batch.tree_slots):
            raise ValueError("rows must come one by one: unroll the batch")
        shared = list(self._shared(batch))
        contexts = {
            window: [self._context(batch, slots, rows, window) for slots, rows in shared]
            for window in dict.fromkeys(layer.window for layer in self._layers)
        }
        return SdpaRowsPlan(torch.from_numpy(batch.write_slots).to(self._device), contexts)

    def run(self, layer: int, queries: torch.Tensor, plan: SdpaRowsPlan) -> torch.Tensor:
        result = queries.new_empty(queries.shape[0], queries.shape[1] * self._layers[layer].value_dim)
        with threads(1):
            for row, keys, values in self._seen(layer, plan, queries.dtype):
                query = queries[row].view(1, keys.shape[0], -1, queries.shape[2])
                attended = F.scaled_dot_product_attention(
                    query, keys.unsqueeze(0), values.unsqueeze(0), scale=self._layers[layer].scale
                )
                result[row] = attended.view(-1)
        return result

    def run_with_lse(
        self, layer: int, queries: torch.Tensor, plan: SdpaRowsPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.empty(queries.shape[:2], device=self._device)
        for row, keys, _ in self._seen(layer, plan, queries.dtype):
            mask = keys.new_zeros((1, keys.shape[1]))
            lse[row] = log_sum_exp(queries[row : row + 1], keys, mask, self._layers[layer].scale)[0]
        return self.run(layer, queries, plan), lse

    def _seen(
        self, layer: int, plan: SdpaRowsPlan, dtype: torch.dtype
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Each row, and the keys and values that it sees: [kv_heads, context, head_dim]."""
        for context in plan.contexts[self._layers[layer].window]:
            k, v = _read(self._cache, layer, context.slots, dtype)
            for row, part in context.rows:
                yield row, k[:, part], v[:, part]

    def _shared(self, batch: Batch) -> Iterator[tuple[Int64Array, list[int]]]:
        """Contexts, and the rows that see the beginning of each: a chunk's rows see that of its last one."""
        longest, rows = np.empty(0, dtype=np.int64), list[int]()
        for row in reversed(range(batch.rows)):
            prefix = batch.prefix_slots[batch.prefix_offsets[row] : batch.prefix_offsets[row + 1]]
            slots = np.append(prefix, batch.tree_slots[row]).astype(np.int64)
            alone = self._device.type != "cpu" or not np.array_equal(slots, longest[: len(slots)])
            if alone:
                if rows:
                    yield longest, rows
                longest, rows = slots, []
            rows.append(row)
        yield longest, rows

    def _context(self, batch: Batch, slots: Int64Array, rows: list[int], window: int | None) -> _Context:
        ends = [int(batch.prefix_offsets[row + 1] - batch.prefix_offsets[row]) + 1 for row in rows]
        firsts = [0] * len(rows)
        if window is not None:
            firsts = [
                min(max(0, int(batch.positions[row]) - window + 1), end - 1)
                for row, end in zip(rows, ends, strict=True)
            ]
        low = min(firsts)
        slots = slots[low:]
        parts = tuple(
            (row, slice(first - low, end - low)) for row, first, end in zip(rows, firsts, ends, strict=True)
        )
        start = int(slots[0])
        if self._device.type == "cpu" and np.array_equal(slots, np.arange(start, start + len(slots))):
            return _Context(slice(start, start + len(slots)), parts)
        return _Context(torch.from_numpy(slots).to(self._device), parts)


FACTORY = AttentionFactory(
    lambda context: SdpaRows if context.invariant else SdpaAttention,
    kinds=frozenset({"kv", "latent"}),
    any_shape=True,
)
