"""Index tables and masks of a batch, as FlashInfer's wrappers take them. Host side, numpy only.

Knows batches and the order of a request's context (its prefix, then its tree slots). Knows no wrapper and no
device. A page is one slot, but for the beginnings of prefixes that lie in slots in order, as prompts do; what
was generated is scattered.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ssd_serve.kernels.batch import Batch, BoolArray, Int32Array, Int64Array, offsets_of
from ssd_serve.kernels.flashinfer.adapter import Tables

_ONES = np.uint64(0xFFFFFFFFFFFFFFFF)


def causal_requests(batch: Batch) -> BoolArray:
    """Return a mask of the requests that are causal: [requests].

    A request is causal where its tree slots follow the prefix without a gap or a branch, and its rows are the
    newest of them, each seeing all before it. Examples are plain decoding, prompt chunks, chains of drafted
    tokens.
    """
    rows, trees = np.diff(batch.request_offsets), np.diff(batch.tree_offsets)
    prefixes = np.diff(batch.prefix_offsets)
    # Of the tree slots, row i of n must see the first (size - n + i + 1).
    seen = np.repeat(trees - rows, rows) + _places(batch.request_offsets) + 1
    ranks = np.repeat(prefixes, trees) + _places(batch.tree_offsets)
    row_fits = (batch.ancestry == _first_bits(seen, batch.ancestry.shape[1])).all(axis=1)
    row_fits &= batch.positions == np.repeat(prefixes, rows) + seen - 1
    slot_fits = batch.tree_positions == ranks
    # A request has a row, and that row a tree slot: no segment is empty.
    by_rows = np.logical_and.reduceat(row_fits, batch.request_offsets[:-1])
    return by_rows & np.logical_and.reduceat(slot_fits, batch.tree_offsets[:-1])


def rows_of(batch: Batch, requests: Int64Array) -> Int64Array:
    """The rows of these requests, in order."""
    owners = np.repeat(np.arange(batch.requests), np.diff(batch.request_offsets))
    return np.flatnonzero(np.isin(owners, requests))


def leading_pages(batch: Batch, page_size: int) -> Int64Array:
    """Count the leading whole pages of each prefix, with slots in order from k * page_size: [requests]."""
    slots, places = batch.prefix_slots, _places(batch.prefix_offsets)
    fits = slots % page_size == places % page_size
    fits[1:] &= (slots[1:] == slots[:-1] + 1) | (places[1:] % page_size == 0)
    breaks = np.append(np.flatnonzero(~fits), len(slots))
    starts, ends = batch.prefix_offsets[:-1], batch.prefix_offsets[1:]
    first = breaks[np.searchsorted(breaks, starts)]  # [requests], the first that does not fit, or behind all
    counts: Int64Array = ((np.minimum(first, ends) - starts) // page_size).astype(np.int64)
    return counts


def make_page_tables(batch: Batch, requests: Int64Array, counts: Int64Array, page_size: int) -> Tables:
    """Tables of the first `counts` [requests of the batch] pages of these requests; each has at least one."""
    starts = batch.prefix_offsets[:-1][requests]
    ends = starts + page_size * counts[requests]
    pages = [batch.prefix_slots[start:end:page_size] for start, end in zip(starts, ends, strict=True)]
    return Tables(
        query_offsets=offsets_of(np.diff(batch.request_offsets)[requests]),
        page_offsets=offsets_of(counts[requests]),
        pages=np.concatenate(pages) // np.int32(page_size),
        last_page_lengths=np.full(len(requests), page_size, dtype=np.int32),
        mask=None,
        page_size=page_size,
    )


def make_tables(
    batch: Batch,
    requests: Int64Array,
    window: int | None,
    *,
    masked: bool,
    skipped: Int64Array | None = None,
) -> Tables:
    """Tables of these requests, in order; at least one. What no row's window reaches is left out, and where
    there is no window the first `skipped` [requests of the batch] positions, which are attended elsewhere.

    `masked`: with a mask that holds ancestry and window; else all these requests must be causal.
    """
    bits = batch.ancestry_bits() if masked else None
    contexts: list[Int32Array] = []
    masks: list[BoolArray] = []
    for request in requests:
        rows = slice(int(batch.request_offsets[request]), int(batch.request_offsets[request + 1]))
        tree = slice(int(batch.tree_offsets[request]), int(batch.tree_offsets[request + 1]))
        prefix = batch.prefix_slots[batch.prefix_offsets[request] : batch.prefix_offsets[request + 1]]
        # The last position out of each row's window.
        oldest = batch.positions[rows] - window if window is not None else np.full(rows.stop - rows.start, -1)
        first = min(max(0, int(oldest.min()) + 1), len(prefix))
        if window is None and skipped is not None:
            first = int(skipped[request])
        contexts += [prefix[first:], batch.tree_slots[tree]]
        if bits is not None:
            before = np.arange(first, len(prefix)) > oldest[:, None]  # [rows, prefix]
            own = bits[rows, : tree.stop - tree.start] & (batch.tree_positions[tree] > oldest[:, None])
            masks.append(np.concatenate((before, own), axis=1).ravel())
    sizes = [len(contexts[index]) + len(contexts[index + 1]) for index in range(0, len(contexts), 2)]
    counts = np.diff(batch.request_offsets)[requests]
    return Tables(
        query_offsets=offsets_of(counts),
        page_offsets=offsets_of(sizes),
        pages=np.concatenate(contexts).astype(np.int32, copy=False),
        last_page_lengths=np.ones(len(requests), dtype=np.int32),
        mask=np.concatenate(masks) if bits is not None else None,
        causal=not masked,
    )


def with_empty_requests(tables: Tables, requests: int) -> Tables:
    """Return the tables padded to `requests` requests; the added ones have neither rows nor context."""
    more = (0, requests - len(tables.last_page_lengths))
    return replace(
        tables,
        query_offsets=np.pad(tables.query_offsets, more, mode="edge"),
        page_offsets=np.pad(tables.page_offsets, more, mode="edge"),
        # A context is (pages - 1) * page_size + the last page's length: none.
        last_page_lengths=np.pad(tables.last_page_lengths, more, constant_values=tables.page_size),
    )


def _first_bits(counts: Int64Array, words: int) -> npt.NDArray[np.uint64]:
    """Return bit masks [rows, words] with the first `counts` [rows] bits set."""
    left = np.clip(counts[:, None] - 64 * np.arange(words), 0, 64)  # [rows, words], bits set in each word
    return np.where(left > 0, _ONES >> (64 - np.maximum(left, 1)).astype(np.uint64), np.uint64(0))


def _places(offsets: Int32Array) -> Int64Array:
    """Return the index of each element in its segment."""
    starts = np.repeat(offsets[:-1], np.diff(offsets))
    return np.arange(len(starts), dtype=np.int64) - starts
