"""Attention that is watched while it serves: what differs is named, what serves is not changed."""

from typing import Any

import pytest
import torch

from ssd_serve.base.logs import Logger
from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.kernels.attention.checked import CheckedAttention, Difference, DifferenceLog
from ssd_serve.kernels.attention.sdpa import SdpaAttention, SdpaPlan
from ssd_serve.kernels.attention.self_test import ReferenceAttention
from ssd_serve.kernels.batch import Batch, build_batch
from tests.kernels.test_attention import filled_cache, rows_of

HEADS, HEAD_DIM = 4, 16


class OneWrong(SdpaAttention):
    """Row 4 of the batch is wrong in head 2, in the second layer."""

    def run(self, layer: int, queries: torch.Tensor, plan: SdpaPlan) -> torch.Tensor:
        out = super().run(layer, queries, plan)
        if layer == 1:
            out[4, 2 * HEAD_DIM + 5] += 1.0
        return out


def batch() -> Batch:
    first = rows_of(range(3), [0, 1, 2], [10, 11, 12], [3, 4, 4], [[0], [0, 1], [0, 2]])
    second = rows_of(range(2), [20, 21], [30, 31], [2, 3], [[0], [0, 1]])
    return build_batch([first, second])


def serve(kind: type[SdpaAttention], forwards: int, every: int) -> tuple[list[Difference], torch.Tensor]:
    cache: KVCache = filled_cache([LayerKV(2, HEAD_DIM)] * 2, torch.float32, torch.Generator().manual_seed(1))
    found: list[Difference] = []
    attention = CheckedAttention(kind(cache, HEADS), ReferenceAttention(cache), found.append, every)
    queries = torch.randn((5, HEADS, HEAD_DIM), generator=torch.Generator().manual_seed(2))
    out = queries
    for _ in range(forwards):
        plan: Any = attention.plan(batch())
        for layer in range(2):
            out = attention.run(layer, queries, plan)
    return found, out


def test_equal_results_are_not_reported() -> None:
    found, out = serve(SdpaAttention, 3, every=1)
    assert found == []
    assert torch.equal(out, serve(SdpaAttention, 1, every=100)[1])


def test_first_difference_names_layer_request_row_and_head() -> None:
    (found,), _ = serve(OneWrong, 1, every=1)
    assert (found.layer, found.request, found.row, found.head) == (1, 1, 1, 2)
    assert found.error > 100


@pytest.mark.parametrize("every", [1, 4, 64])
def test_every_nth_batch_is_checked(every: int) -> None:
    assert len(serve(OneWrong, 64, every)[0]) == 64 // every


def test_differences_are_counted_and_the_first_ones_logged(capsys: pytest.CaptureFixture[str]) -> None:
    log = DifferenceLog(Logger("verifier"))
    for _ in range(100):
        log(Difference(layer=1, request=0, row=2, head=3, error=50.0))
    assert log.count == 100
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 8
    assert "layer=1 request=0 row=2 head=3" in lines[0]


class Silent(SdpaAttention):
    """Gives zeros."""

    def run(self, layer: int, queries: torch.Tensor, plan: SdpaPlan) -> torch.Tensor:
        return torch.zeros_like(super().run(layer, queries, plan))


@pytest.mark.parametrize("scale", [1.0, 0.02])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tolerance_scales_with_small_outputs(scale: float, dtype: torch.dtype) -> None:
    def found(kind: type[SdpaAttention]) -> int:
        cache = KVCache(KVLayout((LayerKV(2, HEAD_DIM),), dtype), 64, "cpu")
        data = torch.randn((64, 4, HEAD_DIM), generator=torch.Generator().manual_seed(1)) * scale
        cache.write(0, torch.arange(64), data.to(dtype))
        log: list[Difference] = []
        attention = CheckedAttention(kind(cache, HEADS), ReferenceAttention(cache), log.append, 1)
        queries = torch.randn((5, HEADS, HEAD_DIM), generator=torch.Generator().manual_seed(2)).to(dtype)
        attention.run(0, queries, attention.plan(batch()))
        return len(log)

    assert found(Silent) == 1
    assert found(SdpaAttention) == 0
