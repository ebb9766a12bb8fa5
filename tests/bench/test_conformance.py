"""Every backend that runs here passes the conformance suite; wrong ones do not."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from ssd_serve.bench.conformance import (
    BATCHES,
    DTYPES,
    HEAD_DIMS,
    LARGE,
    conformance,
)
from ssd_serve.cache.kv import KVCache
from ssd_serve.kernels.attention.contract import Maker
from ssd_serve.kernels.attention.sdpa import SdpaAttention, SdpaPlan
from ssd_serve.kernels.attention.self_test import Heads, Trial, largest_error
from ssd_serve.kernels.native.attention import NativeAttention
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.triton.attention import TritonAttention, TritonPlan


def wrong(make: Maker, dtypes: Sequence[torch.dtype] = DTYPES, *, quick: bool = False) -> list[str]:
    results = list(conformance(make, "cpu", dtypes, quick=quick))
    assert {result.batch for result in results} == set(BATCHES) - (set(LARGE) if quick else set())
    assert {result.trial.heads.head_dim for result in results} == set(HEAD_DIMS)
    return [f"{result.batch}: {result.trial}" for result in results if not result.trial.right]


@pytest.mark.slow
def test_torch() -> None:
    assert wrong(SdpaAttention, (torch.float32,)) == []
    assert wrong(SdpaAttention, (torch.bfloat16,), quick=True) == []


def test_compiled_kernel(native: NativeLibrary) -> None:
    make = partial(NativeAttention, native)
    assert wrong(make, (torch.float32,), quick=True) == []


class Interpreted(TritonAttention):
    """A backend that computes once for both functions, because the interpreter is slow."""

    def __init__(self, cache: KVCache, heads: int) -> None:
        super().__init__(cache, heads, widen=True)
        self._computed = torch.empty(0)

    def run_with_lse(
        self, layer: int, queries: torch.Tensor, plan: TritonPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._computed, sums = super().run_with_lse(layer, queries, plan)
        return self._computed, sums

    def run(self, layer: int, queries: torch.Tensor, plan: TritonPlan) -> torch.Tensor:
        return self._computed


BATCH_NAMES = ("trees and a chunk", "parts of a long prefix", "one row, nothing before it", "padding rows")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "heads"),
    [
        *((name, (2, 1, 64)) for name in BATCH_NAMES),
        (BATCH_NAMES[0], (2, 2, 96)),
        (BATCH_NAMES[0], (4, 2, 256)),
    ],
)
def test_triton_under_its_interpreter(name: str, heads: tuple[int, int, int]) -> None:
    shape = Heads(*heads, torch.float32)
    trial = Trial(shape, largest_error(Interpreted, shape, BATCHES[name], "cpu"))
    assert trial.right, trial


class Short(SdpaAttention):
    """Backend that ignores the last slot of long contexts."""

    def run(self, layer: int, queries: torch.Tensor, plan: SdpaPlan) -> torch.Tensor:
        for pieces in plan.pieces.values():
            for piece in pieces:
                if piece.mask.shape[1] > 5000:
                    piece.mask[:, -1] = -torch.inf
        return super().run(layer, queries, plan)


@pytest.mark.slow
def test_wrong_results_are_named_by_batch() -> None:
    results = conformance(Short, "cpu", (torch.float32,))
    assert {result.batch for result in results if not result.trial.right} == {"8,192 tokens"}
