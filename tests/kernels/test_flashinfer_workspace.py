"""Workspace for FlashInfer: as much as the largest plan divides, on GPUs of every size."""

import pytest
import torch

from ssd_serve.cache.kv import LayerKV
from ssd_serve.kernels.flashinfer.attention import processors_of, workspace_for

H100, MI300X = 132, 304


@pytest.mark.parametrize(
    ("heads", "kv_heads", "processors", "mib"),
    [
        (32, 8, H100, 128),  # an 8B model: the least
        (64, 8, H100, 134),  # a 70B model: what 128 MiB would not hold
        (16, 2, H100, 134),  # one of four ranks of it
        (64, 8, MI300X, 307),
    ],
)
def test_all_processors_may_keep_parts_of_a_long_context(
    heads: int, kv_heads: int, processors: int, mib: int
) -> None:
    found = workspace_for([LayerKV(kv_heads, 128, None)], heads, processors)
    assert found >> 20 == mib
    parts = 2 * processors // kv_heads
    assert found >= heads * parts * 128 * (128 + 1) * 4


def test_the_largest_kind_of_layer_decides() -> None:
    kinds = [LayerKV(8, 64, 4096), LayerKV(8, 256, None)]
    assert workspace_for(kinds, 64, H100) == workspace_for(kinds[1:], 64, H100)


def test_cores_count_as_one() -> None:
    assert processors_of(torch.device("cpu")) == 1
