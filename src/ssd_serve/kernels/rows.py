"""Operations on rows between two products of a layer: norms, rotations, gates.

One contract with two implementations: torch's operators on every device, and compiled ones on CPUs, one call
each, in float32, rounded once. Knows rows and heads, no layers and no cache.
"""

from typing import Protocol

import torch
import torch.nn.functional as F

from ssd_serve.kernels.native.library import FLOAT, INT, POINTER, SIZE, NativeLibrary


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


_SUFFIXES = {torch.float32: "float", torch.bfloat16: "bf16"}
_ROTATE = (POINTER, POINTER, POINTER, SIZE, SIZE, SIZE, SIZE, INT)


class NativeRows:
    """For rows of `dtype` and attention in float32."""

    def __init__(self, library: NativeLibrary, dtype: torch.dtype) -> None:
        suffix = _SUFFIXES[dtype]
        norm_arguments = (POINTER, POINTER, POINTER, FLOAT, POINTER, SIZE, SIZE, INT)
        self._norm = library.function(f"ssd_norm_{suffix}", *norm_arguments)
        self._gate = library.function(f"ssd_gate_{suffix}", POINTER, POINTER, SIZE, SIZE, INT)
        self._rotate = library.function(f"ssd_rotate_{suffix}", *_ROTATE)
        self._rotate_float = library.function("ssd_rotate_float", *_ROTATE)

    def norm(
        self,
        hidden: torch.Tensor,
        added: torch.Tensor | None,
        norm: RmsNorm,
        result: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The result is written to `result` if there is one."""
        result = torch.empty_like(hidden) if result is None else result
        rows, size = hidden.shape
        self._norm(
            hidden.data_ptr(),
            None if added is None else added.data_ptr(),
            norm.scaled.data_ptr(),
            norm.floor,
            result.data_ptr(),
            rows,
            size,
            torch.get_num_threads(),
        )
        return result

    def rotate(
        self,
        qkv: torch.Tensor,
        rotations: torch.Tensor,
        rotated: int,
        norm: RmsNorm | None,
        result: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The result is float32; it is written to `result` if there is one."""
        turn = self._rotate
        if norm is not None:
            qkv, turn = qkv.float(), self._rotate_float
            qkv[:, :rotated] = norm(qkv[:, :rotated])
        result = torch.empty_like(qkv, dtype=torch.float32) if result is None else result
        places = qkv.data_ptr(), rotations.data_ptr(), result.data_ptr()
        rows, heads, head_dim = qkv.shape
        turn(*places, rows, heads, rotated, head_dim, torch.get_num_threads())
        return result

    def gate(self, gate_up: torch.Tensor, result: torch.Tensor | None = None) -> torch.Tensor:
        """The result is written to `result` if there is one."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        result = gate_up.new_empty((rows, width)) if result is None else result
        self._gate(gate_up.data_ptr(), result.data_ptr(), rows, width, torch.get_num_threads())
        return result


def can_operate(library: NativeLibrary, dtype: torch.dtype) -> bool:
    """Return True if there are kernels for `dtype`, and they agree with torch's.

    They write over NaN: memory that torch hands out may hold the right values of an earlier look.
    """
    if dtype not in _SUFFIXES:
        return False
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def nothing(like: torch.Tensor) -> torch.Tensor:
        return torch.full_like(like, torch.nan)

    native, plain = NativeRows(library, dtype), TorchRows(torch.float32)
    norm, heads = RmsNorm(some(40), 1e-6), some(3, 4, 16).to(dtype)
    hidden, added, gates = some(3, 40).to(dtype), some(3, 40).to(dtype), some(3, 80).to(dtype)
    turns = torch.view_as_complex(some(3, 1, 8, 2))
    pairs = (
        (native.norm(hidden.clone(), added, norm, nothing(hidden)), plain.norm(hidden.clone(), added, norm)),
        (native.gate(gates, nothing(hidden)), plain.gate(gates.float())),
        (
            native.rotate(heads, turns, 3, None, nothing(heads).float()),
            plain.rotate(heads.clone(), turns, 3, None),
        ),
    )
    tolerance = 4 * torch.finfo(dtype).eps
    right = all(torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance) for a, b in pairs)
    return library.accept(f"norms, rotations and gates in {_SUFFIXES[dtype]}", right)
