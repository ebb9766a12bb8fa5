"""Rotary position embedding as one complex product.

transformers rotates element i of a head with element i + head_dim / 2. Here the rows of the query and key
matrices are reordered once, at loading, so that the two stand side by side and form a complex number. Scores
do not change, because queries and keys are reordered alike. A rotation is then one product with a table of
cos + i sin. What cannot be computed exactly is refused.
"""

from dataclasses import dataclass
from math import ceil, floor, log, pi
from typing import Literal

import torch

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.config import Json

RopeKind = Literal["default", "linear", "llama3", "yarn", "factors"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Names follow the `rope_parameters` of transformers."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Cosines and sines are multiplied by it (yarn)."""
    truncate: bool = True
    factors: tuple[float, ...] = ()
    """Divisors of the frequencies, one for each pair (`factors`: GGUF files of Llama 3.1 and later)."""


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
        case "factors":
            return plain / torch.tensor(rope.factors)


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


def rope_parameters(raw: Json) -> tuple[Json, str]:
    """The rope parameters under either of their names, and the rope type."""
    parameters: Json = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return parameters, str(parameters.get("rope_type", parameters.get("type", "default")))


def parse_rope(raw: Json) -> RopeConfig:
    """Parse the rope of `config.json`, under its old and new key names."""
    parameters, kind = rope_parameters(raw)
    if float(parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))) != 1.0:
        raise CheckpointError("partial rotary embeddings are not supported")
    theta = float(parameters.get("rope_theta", raw.get("rope_theta", 10000.0)))
    context = int(raw.get("max_position_embeddings", 2048))
    original = int(parameters.get("original_max_position_embeddings") or context)
    factor = float(parameters.get("factor") or 1.0)
    match kind:
        case "default" | "dynamic":
            return RopeConfig(theta=theta)
        case "linear":
            return RopeConfig(theta=theta, kind="linear", factor=factor)
        case "llama3":
            return RopeConfig(
                theta=theta,
                kind="llama3",
                factor=factor,
                original_context=original,
                low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
                high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
            )
        case "factors":
            return RopeConfig(theta=theta, kind="factors", factors=tuple(parameters["factors"]))
        case "yarn" if "mscale" not in parameters:
            return _parse_yarn(parameters, theta, factor, original)
        case _:
            supported = "default, linear, dynamic, llama3, yarn (without mscale)"
            raise CheckpointError(f"rope type {kind!r} is not supported; supported are {supported}")


def _parse_yarn(parameters: Json, theta: float, factor: float, original: int) -> RopeConfig:
    given = parameters.get("attention_factor")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        attention_factor=float(given) if given else 0.1 * log(max(factor, 1.0)) + 1.0,
        truncate=bool(parameters.get("truncate", True)),
    )
