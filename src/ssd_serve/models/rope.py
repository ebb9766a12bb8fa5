"""Rotary position embedding as one complex product.

transformers rotates element i of a head with element i + head_dim / 2. Here the rows of the query and key
matrices are reordered once, at loading, so that the two stand side by side and form a complex number. Scores
do not change, because queries and keys are reordered alike. A rotation is then one product with a table of
cos + i sin. What cannot be computed exactly is refused.
"""

from collections.abc import Mapping
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
    high = high if high != low else low + 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1 - ramp)


_EVERYWHERE = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
            *("mscale", "mscale_all_dim", "truncate", "finetuned"),
        ),
    ),
    "factors": (("factors",), ()),
}
"""Required and other known keys by rope type; `finetuned` changes nothing."""


def rope_parameters(raw: Json) -> tuple[Json, str]:
    """The rope parameters under either of their names, and the rope type.

    Raises `CheckpointError` for a type that is not supported, and keys that are missing or not known.
    """
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise CheckpointError(f"config.json: the rope parameters must be an object, not {parameters!r}")
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    if kind not in _KEYS:
        supported = ", ".join(each for each in _KEYS if each != "factors")
        raise CheckpointError(f"rope type {kind!r} is not supported; supported are {supported}")
    required, known = _KEYS[kind]
    if missing := [key for key in required if key not in parameters]:
        raise CheckpointError(f"config.json: rope of type {kind} needs {', '.join(missing)}")
    if unknown := sorted(set(parameters) - _EVERYWHERE - {*required, *known}):
        raise CheckpointError(
            f"config.json: rope of type {kind} has keys without effect: {', '.join(unknown)}"
        )
    return parameters, kind


def parse_rope(raw: Json) -> RopeConfig:
    """Parse the rope of `config.json`, under its old and new key names, to the values of transformers."""
    parameters, kind = rope_parameters(raw)
    for source in (parameters, raw):
        if (source.get("partial_rotary_factor") or 1.0) != 1.0:
            raise CheckpointError("partial rotary embeddings are not supported")
    theta = _number(parameters if "rope_theta" in parameters else raw, "rope_theta", 10000.0)
    match kind:
        case "linear":
            return RopeConfig(theta=theta, kind="linear", factor=_number(parameters, "factor"))
        case "llama3":
            low, high = (_number(parameters, f"{each}_freq_factor") for each in ("low", "high"))
            if high <= low:
                raise CheckpointError(
                    f"config.json: high_freq_factor {high} is not above low_freq_factor {low}"
                )
            return RopeConfig(
                theta=theta,
                kind="llama3",
                factor=_number(parameters, "factor"),
                original_context=int(_original(parameters, raw)),
                low_freq_factor=low,
                high_freq_factor=high,
            )
        case "factors":
            return RopeConfig(theta=theta, kind="factors", factors=tuple(parameters["factors"]))
        case "yarn":
            return _parse_yarn(parameters, raw, theta)
        case _:
            return RopeConfig(theta=theta)


def _original(parameters: Json, raw: Json) -> float:
    """The context before it was stretched; models of some authors name it outside the rope parameters."""
    key = "original_max_position_embeddings"
    if key in raw or key in parameters:
        return _number(raw if key in raw else parameters, key)
    return _number(raw, "max_position_embeddings", 2048)


def _parse_yarn(parameters: Json, raw: Json, theta: float) -> RopeConfig:
    original = _original(parameters, raw)
    if parameters["factor"] is None:
        factor = _number(raw, "max_position_embeddings", 2048) / original
    else:
        factor = _number(parameters, "factor")
    scales = [parameters.get(key) and _number(parameters, key) for key in ("mscale", "mscale_all_dim")]
    one, all_dims = (_attention_scale(factor, each or 1.0) for each in scales)
    attention = one / all_dims if all(scales) else _attention_scale(factor, 1.0)
    if parameters.get("attention_factor") is not None:
        attention = _number(parameters, "attention_factor")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=int(original),
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        attention_factor=attention,
        truncate=bool(parameters.get("truncate", True)),
    )


def _attention_scale(factor: float, scale: float) -> float:
    return 0.1 * scale * log(max(factor, 1.0)) + 1.0


def _number(source: Json, key: str, default: float | None = None) -> float:
    value = source.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"config.json: {key} of the rope must be a positive number, not {value!r}")
    return float(value)
