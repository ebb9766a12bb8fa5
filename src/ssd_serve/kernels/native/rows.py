"""`RowOperations` by the compiled kernels: one call each, in float32, rounded once.

Knows rows and heads in float32 or bf16 on CPUs; other dtypes are torch's business.
"""

import torch

from ssd_serve.kernels.native.library import FLOAT, INT, POINTER, SIZE, NativeLibrary
from ssd_serve.kernels.rows.operations import RmsNorm, TorchRows

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
