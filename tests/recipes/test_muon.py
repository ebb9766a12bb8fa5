"""Training on CPUs without bfloat16: float32 products, and Muon in float32 beside torch's."""

from typing import Any

import pytest
import torch
from torch import nn

from ssd_serve.recipes import training
from ssd_serve.recipes.muon import Float32Muon, orthogonal
from ssd_serve.recipes.training import Optimiser, Rates, fast_products, product_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_updates_are_those_of_torch_but_for_rounding(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    first = torch.randn(shape)
    ours, theirs = first.clone().requires_grad_(), first.clone().requires_grad_()
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9}
    both: list[Any] = [Float32Muon([ours], **options), torch.optim.Muon([theirs], **options)]
    for _ in range(4):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        for optimiser in both:
            optimiser.step()
    moved = (theirs - first).norm()
    assert (ours - theirs).norm() < 0.03 * moved
    again = torch.optim.Muon([theirs], **options)
    again.load_state_dict(both[0].state_dict())
    torch.testing.assert_close(
        again.state[theirs]["momentum_buffer"], both[1].state[theirs]["momentum_buffer"]
    )


def test_singular_values_become_about_one() -> None:
    torch.manual_seed(2)
    found = orthogonal(torch.randn(24, 60), (3.4445, -4.775, 2.0315), 5, 1e-7)
    values = torch.linalg.svdvals(found)
    assert 0.6 < values.min() < values.max() < 1.3


@pytest.mark.parametrize("fast", [True, False])
def test_bfloat16_is_used_only_where_the_cpu_has_it(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "cpu_has_fast_bf16", lambda: fast)
    dtype = torch.bfloat16 if fast else torch.float32
    assert product_dtype(CPU) is dtype
    assert product_dtype(torch.device("cuda:0")) is torch.bfloat16
    with fast_products(CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype
    state = Optimiser(nn.Linear(4, 4), Rates())
    assert isinstance(state.muon, Float32Muon) is not fast
