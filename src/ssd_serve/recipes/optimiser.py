"""Muon for hidden matrices, AdamW for the rest, and a schedule over tokens.

Muon: Jordan et al. 2024; its orthogonalisation uses the quintic Newton-Schulz iteration of that work.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True)
class Schedule:
    """Learning rate over the tokens seen: warm-up, constant, then linear decay to zero at the last token.

    `warm_up` and `decay` are shares of all tokens.
    """

    tokens: int
    warm_up: float = 0.015
    decay: float = 0.35

    def progress(self, seen: int) -> float:
        """Return the share of the tokens that were seen, 0 to 1."""
        return min(1.0, seen / self.tokens)

    def rate(self, seen: int) -> float:
        """Return the factor on every learning rate, 0 to 1."""
        progress = self.progress(seen)
        return min(1.0, max(progress, 1e-3) / self.warm_up, (1.0 - progress) / self.decay)


@dataclass(frozen=True)
class Rates:
    """Peak learning rates and Muon's weight decay (times its learning rate, per step)."""

    matrix: float = 0.02
    embedding: float = 0.02
    head: float = 0.004
    norm: float = 0.004
    matrix_decay: float = 0.02


class Optimiser:
    """Muon and AdamW over one decoder, stepped together."""

    def __init__(self, decoder: nn.Module, rates: Rates) -> None:
        named = dict(decoder.named_parameters())
        matrices = [p for n, p in named.items() if p.dim() == 2 and ("_proj" in n or n.startswith("fc."))]
        self.muon = Muon(matrices, rates.matrix, rates.matrix_decay)
        groups: list[dict[str, Any]] = [
            {"params": [p for n, p in named.items() if "embed_tokens" in n], "lr": rates.embedding},
            {"params": [p for n, p in named.items() if "lm_head" in n], "lr": rates.head},
            {"params": [p for p in named.values() if p.dim() == 1], "lr": rates.norm},
        ]
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-10, weight_decay=0.0, fused=True)
        self.peaks = [float(group["lr"]) for group in self.adam.param_groups]

    def step(self, factor: float, momentum: float) -> None:
        """Update once with every learning rate multiplied by `factor`, and clear the gradients."""
        self.muon.step(factor, momentum)
        for group, peak in zip(self.adam.param_groups, self.peaks, strict=True):
            group["lr"] = peak * factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both optimisers for a checkpoint."""
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])


class Muon:
    """Momentum with an orthogonalised update; matrices of one shape are updated together."""

    def __init__(self, matrices: Iterable[nn.Parameter], rate: float, decay: float) -> None:
        by_shape: defaultdict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            by_shape[tuple(matrix.shape)].append(matrix)
        self.groups = list(by_shape.values())
        self.momenta = [
            torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self.groups
        ]
        self.rate = rate
        self.decay = decay

    @torch.no_grad()
    def step(self, factor: float, momentum: float) -> None:
        """Apply one Nesterov update and clear the gradients."""
        for group, velocity in zip(self.groups, self.momenta, strict=True):
            gradient = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            velocity.lerp_(gradient, 1.0 - momentum)
            update = orthogonalise(gradient.lerp(velocity, momentum))  # [matrices, rows, columns]
            rows, columns = group[0].shape
            rate = self.rate * factor
            scale = rate * max(1.0, rows / columns) ** 0.5
            for matrix, change in zip(group, update, strict=True):
                matrix.mul_(1.0 - rate * self.decay).add_(change, alpha=-scale)
                matrix.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the momenta."""
        return {"momenta": self.momenta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for velocity, stored in zip(self.momenta, state["momenta"], strict=True):
            velocity.copy_(stored)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return roughly the nearest (semi-)orthogonal matrices: [n, rows, columns] fp32, computed in bf16."""
    a, b, c = NEWTON_SCHULZ
    x: Tensor = matrices.bfloat16()
    wide = x.shape[-2] <= x.shape[-1]
    if not wide:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.mT).float()
