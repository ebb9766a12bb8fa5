"""Rotary position embedding as one complex product.

transformers rotates element i of a head with element i + head_dim / 2. Here the rows of the query and key
matrices are reordered once, at loading, so that the two stand side by side and form a complex number; scores
do not change, because queries and keys are reordered alike. A rotation is then one product with a table of
cos + i sin.
"""

from math import ceil, floor, log, pi

import torch

from ssd_serve.models.config import RopeConfig


def interleave(head_dim: int, heads: int) -> torch.Tensor:
    """Row order that puts each pair (i, i + head_dim / 2) of a head side by side: int64 [rows]."""
    pairs = torch.arange(head_dim).view(2, head_dim // 2).t().reshape(-1)  # [head_dim]
    return (torch.arange(heads)[:, None] * head_dim + pairs).reshape(-1)


def rotation_table(rope: RopeConfig, head_dim: int, context: int) -> torch.Tensor:
    """Rotations of all positions: complex64 [context, head_dim / 2]."""
    angles = torch.outer(torch.arange(context, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return torch.polar(torch.full_like(angles, rope.attention_factor), angles)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians a position for each pair: float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / rope.theta**exponents
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain, head_dim)


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended (Llama 3.1)."""
    wavelengths = 2 * pi / plain
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = ((rope.original_context / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * plain / rope.factor + smooth * plain


def _yarn(rope: RopeConfig, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Plain and stretched frequencies blended by their turns in the original context (arXiv 2309.00071)."""

    def dimension(turns: float) -> float:
        return head_dim * log(rope.original_context / (turns * 2 * pi)) / (2 * log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high if high > low else low + 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1 - ramp)
