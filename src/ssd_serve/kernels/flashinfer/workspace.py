"""How much memory FlashInfer's kernels need for what they compute apart and add up later.

Knows the formula by which upstream's planning divides its workspace; not what is planned.
"""

from collections.abc import Iterable

import torch

from ssd_serve.cache.kv import LayerKV

_LEAST = 128 << 20
_TILE_ROWS = 128
"""Of the largest tiles."""
_TILES_AT_ONCE = 2
"""On each of a GPU's processors."""
_SUMS = torch.float32.itemsize


def workspace_for(kinds: Iterable[LayerKV], heads: int, processors: int) -> int:
    """Bytes for layers of these kinds with `heads` query heads, on a GPU of so many `processors`.

    A long context is divided until every processor has work: each part keeps a result in float32 and a sum
    for every head of each row of its tile (upstream's PrefillPlan). What does not fit makes a plan fail, in
    the first long prompt.
    """
    largest = max(
        heads * max(1, _TILES_AT_ONCE * processors // kind.heads) * _TILE_ROWS * (kind.head_dim + 1) * _SUMS
        for kind in kinds
    )
    return max(_LEAST, largest + (1 << 20))


def processors_of(device: torch.device) -> int:
    """A GPU's; 1 where none computes."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
