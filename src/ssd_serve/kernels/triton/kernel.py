# pyright: basic, reportOperatorIssue=false
"""Tree attention in Triton: one program reads a part of one request's context once, for a tile of its rows.

The context of a request is its prefix, in parts of `SPLIT` entries, and its tree slots, a part of their own.
Every part gives a partial result and its log-sum-exp (split-KV, as in FlashDecoding); `merge_parts` combines
them. The query heads of a KV head are stacked as rows. Knows pointers and sizes, not batches.
"""

import triton
import triton.language as tl


# Arguments that differ between batches: another number of rows must not cause a compilation.
@triton.jit(do_not_specialize=["first_tile", "first_row", "rows", "words"])
def attend_parts(
    queries,
    keys,
    values,
    partial,
    partial_lse,
    tile_requests,
    tile_rows,
    tile_counts,
    positions,
    prefix_slots,
    prefix_offsets,
    tree_slots,
    tree_offsets,
    tree_positions,
    ancestry,
    query_row_stride,
    query_head_stride,
    head_stride,
    slot_stride,
    first_tile,
    first_row,
    rows,
    heads,
    words,
    window,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Program (tile, KV head, part): part 0 is the tree, part i the prefix's i-th `SPLIT` entries.

    Computes tiles from `first_tile` on; their rows are `rows` from `first_row` on. Skips tiles without rows,
    and parts that a tile's request does not have.

    `queries` [rows, heads, HEAD_DIM], `keys` and `values` [kv_heads, slots, HEAD_DIM] with the given strides.
    `partial` float32 [parts, rows, heads, HEAD_DIM] and `partial_lse` float32
    [parts, rows, heads] (natural logarithm; -inf where a row sees nothing of a part). `ancestry` int32 [rows,
    words]; `window` counts where WINDOWED. WIDEN computes in float32 for every dtype of the cache.
    """
    tile, kv_head, part = first_tile + tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = tl.load(tile_requests + tile)
    stacked = tl.arange(0, BLOCK_M)
    count = tl.load(tile_counts + tile)
    live = stacked < count * GROUP
    row = tl.load(tile_rows + tile) + stacked // GROUP
    head = kv_head * GROUP + stacked % GROUP
    dims = tl.arange(0, BLOCK_D)
    inside = dims < HEAD_DIM

    if part == 0:
        base = tl.load(tree_offsets + request)
        first = 0
        end = tl.load(tree_offsets + request + 1) - base
        slots = tree_slots + base
    else:
        base = tl.load(prefix_offsets + request)
        first = (part - 1) * SPLIT
        end = tl.minimum(first + SPLIT, tl.load(prefix_offsets + request + 1) - base)
        slots = prefix_slots + base
    if (count == 0) | (first >= end):  # no such tile, or no such part of this request
        return

    oldest = tl.load(positions + row, mask=live, other=0).to(tl.int32) - window
    if WINDOWED:  # a constant, and no branch: Triton 3.5 fails to compile a branch that sets a loop's bound
        least = tl.min(tl.where(live, oldest, 2147483647), 0) + 1
        reached = tl.maximum(first, tl.maximum(least, 0) // BLOCK_N * BLOCK_N)
        first = tl.where(part > 0, reached, first)  # what lies before every row's window is not read

    at = queries + row[:, None] * query_row_stride + head[:, None] * query_head_stride + dims[None, :]
    q = tl.load(at, mask=live[:, None] & inside[None, :], other=0.0)  # [BLOCK_M, BLOCK_D]
    if WIDEN:
        q = q.to(tl.float32)
    greatest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(first, end, BLOCK_N):
        entry = start + tl.arange(0, BLOCK_N)
        there = entry < end
        slot = tl.load(slots + entry, mask=there, other=0).to(tl.int64)
        where = kv_head * head_stride + slot * slot_stride
        k = tl.load(keys + where[None, :] + dims[:, None], mask=there[None, :] & inside[:, None], other=0.0)
        v = tl.load(values + where[:, None] + dims[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        seen = live[:, None] & there[None, :]
        if part == 0:
            word = tl.load(ancestry + row[:, None] * words + (entry // 32)[None, :], mask=seen, other=0)
            seen = seen & (((word >> (entry % 32)[None, :]) & 1) != 0)
            position = tl.load(tree_positions + base + entry, mask=there, other=0).to(tl.int32)
        else:
            position = entry
        if WINDOWED:
            seen = seen & (position[None, :] > oldest[:, None])
        if WIDEN:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, k, input_precision="ieee") * (scale * 1.4426950408889634)  # in units of ln 2
        scores = tl.where(seen, scores, float("-inf"))
        larger = tl.maximum(greatest, tl.max(scores, 1))
        safe = tl.where(larger == float("-inf"), 0.0, larger)  # infinity less infinity is no number
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(greatest - safe)
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None]
        result = tl.dot(weights.to(v.dtype), v, result, input_precision="ieee")
        greatest = larger

    some = total > 0.0
    result = result / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, (greatest + tl.log2(tl.where(some, total, 1.0))) * 0.6931471805599453, float("-inf"))
    place = (part * rows + row - first_row).to(tl.int64) * heads + head
    tl.store(partial_lse + place, lse, mask=live)
    tl.store(
        partial + place[:, None] * HEAD_DIM + dims[None, :], result, mask=live[:, None] & inside[None, :]
    )


@triton.jit(do_not_specialize=["first_row", "rows"])
def merge_parts(
    partial,
    partial_lse,
    out,
    lse,
    row_parts,
    first_row,
    rows,
    heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Program (row, head), rows from `first_row` on: weigh the parts of a row by their log-sum-exp, BLOCK_P
    of them at a time, always in the same order.

    `row_parts` int32 [rows]: how many parts the row's request has; `out` [rows, heads, HEAD_DIM]; `lse`
    float32 [rows, heads].
    """
    of_these, head = tl.program_id(0), tl.program_id(1)
    row = first_row + of_these
    dims = tl.arange(0, BLOCK_D)
    inside = dims < HEAD_DIM
    greatest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    result = tl.zeros([BLOCK_D], tl.float32)
    count = tl.load(row_parts + row)
    for start in range(0, count, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        there = part < count
        place = (part * rows + of_these).to(tl.int64) * heads + head  # [BLOCK_P]
        its = tl.load(partial_lse + place, mask=there, other=float("-inf"))
        larger = tl.maximum(greatest, tl.max(its, 0))
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        shrink, weight = tl.exp(greatest - safe), tl.exp(its - safe)
        at = partial + place[:, None] * HEAD_DIM + dims[None, :]
        value = tl.load(at, mask=there[:, None] & inside[None, :], other=0.0)  # [BLOCK_P, BLOCK_D]
        result = result * shrink + tl.sum(value * weight[:, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        greatest = larger
    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    place = row * heads + head
    tl.store(lse + place, tl.where(some, greatest + tl.log(divisor), float("-inf")))
    tl.store(out + place * HEAD_DIM + dims, (result / divisor).to(out.dtype.element_ty), mask=inside)
