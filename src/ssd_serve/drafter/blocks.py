"""Best-first trees from blocks: drafts of several positions in one forward.

The reach of a path is the product of its tokens' probabilities, each position's own or those of neighbouring pairs.
The nodes of highest reach maximise the expected number of accepted tokens (DDTree, arXiv 2604.12989, section 3). Knows
arrays; no tree, request or message.
"""

import heapq
from collections.abc import Callable, Collection
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ssd_serve.drafter.sources.contract import Block, Branch
from ssd_serve.kernels.native.library import DOUBLE, POINTER, SIZE, NativeLibrary

Int32s: TypeAlias = npt.NDArray[np.int32]
Float32s: TypeAlias = npt.NDArray[np.float32]


class CandidateRows(NamedTuple):
    """Rows of candidates, best first, that the nodes of a tree share; row 0 is that of the block's own node."""

    tokens: Int32s  # [rows, candidates]
    log_probabilities: Float32s  # [rows, candidates]
    following: (
        Int32s  # [rows, candidates], the row of each candidate's own candidates; -1: nothing grows below it
    )


class BlockTree(NamedTuple):
    """Expanded nodes, each after its parent; the first is the block's own node."""

    parents: list[int]
    """Indices of the parents in these lists; -1 for the first."""
    ranks: list[int]
    """Each node's rank among its parent's candidates."""
    rows: list[int]
    """The row of each node's own candidates."""


TreeGrower: TypeAlias = Callable[[CandidateRows, int, float], BlockTree]
"""Returns the tree of up to so many nodes of highest reach, none of them below a log reach."""


def candidate_rows(block: Block, positions: int, ends: Collection[int]) -> CandidateRows | None:
    """Return the rows of the first positions of a block, without candidates of no finite probability; None if there
    are none. Nothing grows below tokens in `ends`."""
    values = block.log_probabilities[:positions]
    finite = np.isfinite(values)
    if not finite.all():
        counts = finite.sum(axis=1)
        positions = int((counts > 0).argmin()) if not counts.all() else len(counts)
        values = values[:positions, : counts[:positions].min(initial=values.shape[1])]
    levels, width = values.shape
    if levels == 0 or width == 0:
        return None
    tokens, values = block.tokens[:levels, :width], np.minimum(values, 0.0)
    if block.pairs is None:
        following = np.repeat(np.arange(1, levels + 1, dtype=np.int32)[:, None], width, axis=1)
    else:
        pairs = np.nan_to_num(
            np.minimum(block.pairs[: levels - 1, :width, :width], 0.0), nan=-1e9, neginf=-1e9
        )
        order = np.argsort(-pairs, axis=2, kind="stable")
        below = np.repeat(tokens[1:, None, :], width, axis=1)
        starts = 1 + width * np.arange(1, levels)[:, None, None]
        first = 1 + np.arange(width)[None]
        following = np.concatenate((first, (starts + order).reshape(-1, width))).astype(np.int32)
        tokens = np.concatenate((tokens[:1], np.take_along_axis(below, order, 2).reshape(-1, width)))
        values = np.concatenate((values[:1], np.take_along_axis(pairs, order, 2).reshape(-1, width)))
    following[following >= len(tokens)] = -1
    if ends:
        following[np.isin(tokens, list(ends))] = -1
    return CandidateRows(np.ascontiguousarray(tokens), np.ascontiguousarray(values, np.float32), following)


def grow_tree(rows: CandidateRows, nodes: int, least: float) -> BlockTree:
    """Grow a tree by a heap of the best candidate of each node that was not taken yet."""
    values: list[list[float]] = rows.log_probabilities.tolist()
    following: list[list[int]] = rows.following.tolist()
    tree, reach = BlockTree([-1], [0], [0]), [0.0]
    order, waiting = 1, [(-values[0][0], 0, 0, 0)]
    while waiting and len(reach) < nodes:
        cost, _, node, rank = heapq.heappop(waiting)
        if -cost < least:
            break
        row = tree.rows[node]
        if rank + 1 < len(values[row]):
            heapq.heappush(waiting, (-(reach[node] + values[row][rank + 1]), order, node, rank + 1))
            order += 1
        below = following[row][rank]
        if below < 0:
            continue
        heapq.heappush(waiting, (cost - values[below][0], order, len(reach), 0))
        order += 1
        for each, value in zip(tree, (node, rank, below), strict=True):
            each.append(value)
        reach.append(-cost)
    return tree


class NativeTrees:
    """`grow_tree` compiled. A tree of 64 nodes takes less time than the launch of a kernel, so that it is built on the
    host for GPUs as well: they rank the candidates."""

    def __init__(self, library: NativeLibrary) -> None:
        self._grow = library.function(
            "ssd_grow_tree", POINTER, POINTER, SIZE, SIZE, DOUBLE, *(POINTER,) * 3, result=SIZE
        )

    def __call__(self, rows: CandidateRows, nodes: int, least: float) -> BlockTree:
        made = np.empty((3, nodes), np.int32)
        values, following = rows.log_probabilities, rows.following
        places = [made[index].ctypes.data for index in range(3)]
        count: int = self._grow(
            values.ctypes.data, following.ctypes.data, values.shape[1], nodes, least, *places
        )
        if not count:
            raise MemoryError("there is no memory left for a tree; run fewer requests at once")
        return BlockTree(*made[:, :count].tolist())


def branches_of(rows: CandidateRows, tree: BlockTree) -> list[Branch]:
    """Return the nodes of a tree with their paths."""
    tokens: list[list[int]] = rows.tokens.tolist()
    values: list[list[float]] = rows.log_probabilities.tolist()
    found: list[Branch] = []
    for parent, rank, row in zip(*tree, strict=True):
        path = (*found[parent].path, found[parent].tokens[rank]) if parent >= 0 else ()
        found.append(Branch(path, tokens[row], values[row]))
    return found
