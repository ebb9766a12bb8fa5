"""The models of the dense family: how each differs from Llama in its `config.json`."""

from dataclasses import replace

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.architectures.dense.config import DecoderConfig, parse_dense
from ssd_serve.models.architectures.dense.decoder import dense_architecture
from ssd_serve.models.config import Json


def _parse_llama(raw: Json, generation: Json) -> DecoderConfig:
    bias, mlp_bias = bool(raw.get("attention_bias", False)), bool(raw.get("mlp_bias", False))
    config = parse_dense(raw, generation)
    return replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


def _parse_mistral(raw: Json, generation: Json) -> DecoderConfig:
    config = parse_dense(raw, generation)
    window = int(raw.get("sliding_window") or 0) or None
    return replace(config, windows=(window,) * config.layers)


def _parse_qwen2(raw: Json, generation: Json) -> DecoderConfig:
    config = parse_dense(raw, generation)
    return replace(config, qkv_bias=True, windows=_qwen_windows(raw, config.layers))


def _parse_qwen3(raw: Json, generation: Json) -> DecoderConfig:
    config = parse_dense(raw, generation, head_dim=128)
    bias, windows = bool(raw.get("attention_bias", False)), _qwen_windows(raw, config.layers)
    return replace(config, qk_norm=True, qkv_bias=bias, output_bias=bias, windows=windows)


def _qwen_windows(raw: Json, layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if not window or not raw.get("use_sliding_window", False):
        return (None,) * layers
    types = raw.get("layer_types")
    if types is None:
        full = int(raw.get("max_window_layers", 28))
        types = ["full_attention" if layer < full else "sliding_attention" for layer in range(layers)]
    if len(types) != layers or set(types) - {"full_attention", "sliding_attention"}:
        raise CheckpointError(f"config.json: layer_types {types} are not supported")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in types)


LLAMA = dense_architecture("Llama 2 and 3.x, Vicuna", _parse_llama)
MISTRAL = dense_architecture("Mistral", _parse_mistral)
QWEN2 = dense_architecture("Qwen 2 and 2.5", _parse_qwen2)
QWEN3 = dense_architecture("Qwen 3", _parse_qwen3)
