"""Qwen 2: Llama with biases of query, key and value, and sliding windows in some layers."""

from dataclasses import replace

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.architectures.dense.config import DecoderConfig, parse_dense
from ssd_serve.models.architectures.dense.decoder import dense_architecture
from ssd_serve.models.config import Json


def parse(raw: Json, generation: Json) -> DecoderConfig:
    """Read `config.json`."""
    config = parse_dense(raw, generation)
    return replace(config, qkv_bias=True, windows=qwen_windows(raw, config.layers))


def qwen_windows(raw: Json, layers: int) -> tuple[int | None, ...]:
    """Each layer's window, as Qwen models name them."""
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


QWEN2 = dense_architecture("Qwen 2 and 2.5", parse)
