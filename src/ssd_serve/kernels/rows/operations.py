"""Operations on rows between two products of a layer: norms, rotations, gates.

One contract with two implementations: torch's operators on every device (here), and compiled ones on CPUs
(`kernels/native/rows`). Knows rows and heads, no layers and no cache.
"""

from typing import Protocol

import torch
import torch.nn.functional as F


class RmsNorm:
    """Root-mean-square norm. `weight` is [..., size]; its leading dimensions broadcast against the rows'.

    `scaled` is the weight times sqrt(size), `floor` is sqrt(epsilon * size).
    """

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        size = weight.shape[-1]
        self._weight = weight
        self._epsilon = epsilon
        self._native = weight.device.type != "cpu"  # one fused kernel on GPUs
        self.scaled = (weight.float() * size**0.5).contiguous()
        self.floor = (epsilon * size) ** 0.5
        self._floor = torch.tensor(self.floor)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [..., size] -> [..., size], in the dtype of the rows."""
        if self._native:
            return torch.rms_norm(rows, rows.shape[-1:], None, self._epsilon).mul_(self._weight)
        exact = rows.float()
        length: torch.Tensor = torch.linalg.vector_norm(exact, 2, -1, True)  # [..., 1]
        return (exact / length.hypot_(self._floor)).mul_(self.scaled).to(rows.dtype)


class RowOperations(Protocol):
    """A row's result never depends on the other rows."""

    def norm(self, hidden: torch.Tensor, added: torch.Tensor | None, norm: RmsNorm) -> torch.Tensor:
        """Add `added` to `hidden` (both [rows, hidden]) in place, if there is any, and norm the sum."""
        ...

    def rotate(
        self, qkv: torch.Tensor, rotations: torch.Tensor, rotated: int, norm: RmsNorm | None
    ) -> torch.Tensor:
        """Heads [rows, heads, head_dim] for attention: the first `rotated` ones normed, if there is a norm,
        and multiplied by their row's rotation, complex64 [rows, 1, head_dim / 2]."""
        ...

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu of the first half times the second: [rows, 2 * width] -> [rows, width]."""
        ...


class TorchRows:
    """`RowOperations` by torch. `dtype` is the attention's."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def norm(self, hidden: torch.Tensor, added: torch.Tensor | None, norm: RmsNorm) -> torch.Tensor:
        if added is not None:
            hidden.add_(added)
        return norm(hidden)

    def rotate(
        self, qkv: torch.Tensor, rotations: torch.Tensor, rotated: int, norm: RmsNorm | None
    ) -> torch.Tensor:
        """Rotates in float32 for every dtype."""
        qkv = qkv.to(self._dtype)
        qk = qkv[:, :rotated]
        if norm is not None:
            qk.copy_(norm(qk))
        pairs = qk.float()  # the same storage if it is float32 already
        torch.view_as_complex(pairs.view(*pairs.shape[:2], -1, 2)).mul_(rotations)
        if pairs is not qk:
            qk.copy_(pairs)
        return qkv

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)
