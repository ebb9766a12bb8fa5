"""The configuration of a decoder, read from a Hugging Face `config.json`.

Knows the key names and defaults of the supported architectures; knows no tensors. What it cannot compute
exactly it refuses: an unknown architecture, activation or rope type is a `CheckpointError`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any, Literal, cast

from ssd_serve.errors import CheckpointError
from ssd_serve.models.weights.quantization import Fp8Scheme, parse_quantization

Json = Mapping[str, Any]
RopeKind = Literal["default", "linear", "llama3", "yarn"]

SUPPORTED = {
    "LlamaForCausalLM": "Llama 2 and 3.x, Vicuna",
    "MistralForCausalLM": "Mistral",
    "Qwen2ForCausalLM": "Qwen 2 and 2.5",
    "Qwen3ForCausalLM": "Qwen 3",
}


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


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything that decides the computation of one decoder."""

    architecture: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    norm_epsilon: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    """Each layer's sliding window in tokens, the row's own included; None: attends to everything."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    eos_token_ids: tuple[int, ...]
    fp8: Fp8Scheme | None = None
    """How weights are scaled that lie in the file in fp8; None: none may."""


def load_config(folder: Path) -> DecoderConfig:
    """Read `config.json` (and `generation_config.json` for EOS ids) of a model folder."""
    generation = folder / "generation_config.json"
    return parse_config(read_raw(folder), read_json(generation) if generation.is_file() else {})


def read_raw(folder: Path) -> Json:
    """What `config.json` of a model folder says."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; a model is a folder in the Hugging Face layout")
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no config.json; is it a model folder in the Hugging Face layout?"
        )
    return read_json(path)


def model_name(folder: Path) -> str:
    """What people call a model: its hub id where the folder is a hub download, else the folder's name."""
    parent = folder.parent
    if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
        return parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    return f"embedded-{folder.name}" if parent.name == "embedded" else folder.name


def read_json(path: Path) -> Json:
    """A JSON object from a file, or a `CheckpointError`."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return cast(Json, data)


def parse_config(raw: Json, generation: Json | None = None) -> DecoderConfig:
    """Build the configuration from the parsed `config.json`."""
    architecture = _architecture(raw)
    # Exports of compressed-tensors before its version 0.6 use the second name.
    fp8 = parse_quantization(raw.get("quantization_config") or raw.get("compression_config"))
    if (activation := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise CheckpointError(f"activation {activation!r} is not supported; only 'silu' is")
    hidden, heads, layers = (
        _size(raw, key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    bias = bool(raw.get("attention_bias", False))
    rope = _rope(raw)
    context = int(raw.get("max_position_embeddings", 2048))
    if _rope_raw(raw)[1] == "dynamic":
        # Dynamic scaling changes earlier keys beyond the original context; up to there it is plain rope.
        context = min(context, int(_rope_raw(raw)[0].get("original_max_position_embeddings", context)))
    return DecoderConfig(
        architecture=architecture,
        vocabulary=_size(raw, "vocab_size"),
        hidden=hidden,
        intermediate=_size(raw, "intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=int(raw.get("head_dim") or (128 if architecture == "Qwen3ForCausalLM" else hidden // heads)),
        context=context,
        norm_epsilon=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope,
        windows=_windows(architecture, raw, layers),
        qkv_bias=architecture == "Qwen2ForCausalLM" or (architecture != "MistralForCausalLM" and bias),
        output_bias=architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and bias,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        tied=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=eos_ids(raw, generation or {}),
        fp8=fp8,
    )


def _architecture(raw: Json) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in SUPPORTED:
            return str(name)
    found = ", ".join(names) or f"unnamed (model_type {raw.get('model_type', 'missing')!r})"
    supported = "; ".join(f"{name} ({models})" for name, models in SUPPORTED.items())
    raise CheckpointError(f"architecture {found} is not supported; supported are {supported}")


def _size(raw: Json, key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _windows(architecture: str, raw: Json, layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if architecture == "LlamaForCausalLM" or not window:
        return (None,) * layers
    if architecture == "MistralForCausalLM":
        return (int(window),) * layers
    if not raw.get("use_sliding_window", False):
        return (None,) * layers
    types = raw.get("layer_types")
    if types is None:
        full = int(raw.get("max_window_layers", 28))
        types = ["full_attention" if layer < full else "sliding_attention" for layer in range(layers)]
    if len(types) != layers or set(types) - {"full_attention", "sliding_attention"}:
        raise CheckpointError(f"config.json: layer_types {types} are not supported")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in types)


def _rope_raw(raw: Json) -> tuple[Json, str]:
    """The rope parameters under either of their names, and the rope type."""
    parameters: Json = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return parameters, str(parameters.get("rope_type", parameters.get("type", "default")))


def _rope(raw: Json) -> RopeConfig:
    parameters, kind = _rope_raw(raw)
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
        case "yarn" if "mscale" not in parameters:
            return _yarn(parameters, theta, factor, original)
        case _:
            supported = "default, linear, dynamic, llama3, yarn (without mscale)"
            raise CheckpointError(f"rope type {kind!r} is not supported; supported are {supported}")


def _yarn(parameters: Json, theta: float, factor: float, original: int) -> RopeConfig:
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


def eos_ids(raw: Json, generation: Json) -> tuple[int, ...]:
    """EOS ids of both files; chat models often name their end of turn in generation_config.json only."""
    ids: list[int] = []
    for source in (raw.get("eos_token_id"), generation.get("eos_token_id")):
        ids += source if isinstance(source, list) else [] if source is None else [int(source)]
    return tuple(dict.fromkeys(ids))
