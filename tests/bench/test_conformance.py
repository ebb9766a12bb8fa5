"""Every backend that runs here passes the conformance suite; wrong ones do not."""

import itertools
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
    every_batch,
)
from ssd_serve.cache.kv import KVCache
from ssd_serve.kernels.attention.contract import Maker
from ssd_serve.kernels.attention.sdpa import SdpaAttention, SdpaPlan
from ssd_serve.kernels.attention.self_test import SMALL, Heads, Trial, largest_error
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
    assert wrong(SdpaAttention, (torch.bfloat16, torch.float16), quick=True) == []


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


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in BATCHES if name not in LARGE])
def test_triton_under_its_interpreter_with_every_batch(name: str) -> None:
    heads = Heads(2, 1, 64, torch.float32)
    trial = Trial(heads, largest_error(Interpreted, heads, BATCHES[name], "cpu"))
    assert trial.right, trial


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("head_dim", "numbers"), list(zip(HEAD_DIMS, itertools.cycle(((4, 1), (2, 2), (4, 2)))))
)
def test_triton_under_its_interpreter_with_every_shape(head_dim: int, numbers: tuple[int, int]) -> None:
    heads = Heads(*numbers, head_dim, torch.float32)
    trial = Trial(heads, largest_error(Interpreted, heads, SMALL[0], "cpu"))
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
def test_what_is_wrong_is_named() -> None:
    results = every_batch(Short, "cpu", torch.float32, quick=False)
    assert {result.batch for result in results if not result.trial.right} == {"8,192 tokens"}
