"""Muon (Jordan et al. 2024) in float32, for CPUs that only emulate the bfloat16 of torch's own."""

from typing import Any

import torch
from torch import Tensor


class Float32Muon(torch.optim.Muon):
    """torch's Muon with products in float32 and the same state; it ignores `nesterov` and `adjust_lr_fn`."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch's also takes a function
        """Update each matrix that has a gradient once."""
        del closure
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)

    def _update(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, rate, share = self.state[weight], group["lr"], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        mean = state["momentum_buffer"].lerp_(grad, 1 - share)
        update = orthogonal(grad.lerp(mean, share), group["ns_coefficients"], group["ns_steps"], group["eps"])
        rows, columns = weight.shape
        weight.mul_(1 - rate * group["weight_decay"])
        weight.add_(update, alpha=-rate * max(1.0, rows / columns) ** 0.5)


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return a matrix with the same singular vectors, and singular values near 1, by Newton-Schulz iteration."""
    linear, cubic, quintic = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if tall else matrix
    found = found.div(found.norm().clamp(min=eps))  # so that no singular value exceeds 1
    for _ in range(steps):
        gram = found @ found.T
        found = linear * found + (cubic * gram + quintic * gram @ gram) @ found
    return found.T if tall else found
