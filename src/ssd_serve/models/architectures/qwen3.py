"""Qwen 3: heads of 128 with normed queries and keys, and the windows of Qwen 2."""

from dataclasses import replace

from ssd_serve.models.architectures.dense.config import DecoderConfig, parse_dense
from ssd_serve.models.architectures.dense.decoder import dense_architecture
from ssd_serve.models.architectures.qwen2 import qwen_windows
from ssd_serve.models.config import Json


def parse(raw: Json, generation: Json) -> DecoderConfig:
    """Read `config.json`."""
    config = parse_dense({**raw, "head_dim": raw.get("head_dim") or 128}, generation)
    bias, windows = bool(raw.get("attention_bias", False)), qwen_windows(raw, config.layers)
    return replace(config, qk_norm=True, qkv_bias=bias, output_bias=bias, windows=windows)


QWEN3 = dense_architecture("Qwen 3", parse)
