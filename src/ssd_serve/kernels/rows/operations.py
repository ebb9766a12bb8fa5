"""What happens to rows between two products of a layer: norms, rotations, gates.

One contract with two implementations: torch's operators on every device (here), and compiled ones on CPUs
(`kernels/native/rows`). Knows rows and heads, no layers and no cache.
"""

from typing import Protocol

import torch
import torch.nn.functional as F

from ssd_serve.kernels.rows.norm import RmsNorm


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
        """Rotates in float32 whatever the dtype."""
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
