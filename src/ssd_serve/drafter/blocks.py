"""Best-first trees from blocks: drafts of several positions in one forward.

The reach of a path is the product of its tokens' probabilities, each position's own or those of neighbouring pairs.
The nodes of highest reach maximise the expected number of accepted tokens (DDTree, arXiv 2604.12989, section 3). Knows
arrays; no tree, request or message.
"""

import heapq
import math

from ssd_serve.drafter.sources.contract import Block, Branch


def block_branches(block: Block, nodes: int, least: float) -> list[Branch]:
    """Return the expansions of up to `nodes` nodes of highest reach, the block's own node first, parents first.

    Nodes of a log reach below `least` are left out. Nodes of the last position have no candidates.
    """
    positions, candidates = block.tokens.shape
    tokens: list[list[int]] = block.tokens.tolist()
    alone: list[list[float]] = block.log_probabilities.tolist()
    scores: list[list[float]] = block.scores.tolist()
    means: list[float] = block.expected_scores.tolist()
    pairs = None if block.pairs is None else block.pairs.tolist()
    made: list[Branch] = []
    order = 0
    waiting: list[tuple[float, int, tuple[int, ...], int, int]] = [(0.0, 0, (), -1, 0)]
    while waiting and len(made) < nodes:
        cost, _, path, rank, level = heapq.heappop(waiting)
        if level == positions:
            continue
        values = alone[level] if pairs is None or level == 0 else pairs[level - 1][rank]
        ranks = sorted(range(candidates), key=lambda each: -values[each])
        ranks = [each for each in ranks if math.isfinite(values[each])]
        level_scores = [scores[level][each] for each in ranks] if pairs is None or level == 0 else []
        made.append(
            Branch(
                path,
                [tokens[level][each] for each in ranks],
                [values[each] for each in ranks],
                level_scores,
                means[level],
            )
        )
        for each in ranks:
            if values[each] - cost >= least:
                order += 1
                heapq.heappush(
                    waiting, (cost - values[each], order, (*path, tokens[level][each]), each, level + 1)
                )
    return made
