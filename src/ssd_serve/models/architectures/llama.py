"""Llama: the plain dense decoder, with biases where its configuration wants them."""

from dataclasses import replace

from ssd_serve.models.architectures.dense.config import DecoderConfig, parse_dense
from ssd_serve.models.architectures.dense.decoder import dense_architecture
from ssd_serve.models.config import Json


def parse(raw: Json, generation: Json) -> DecoderConfig:
    """Read `config.json`."""
    bias, mlp_bias = bool(raw.get("attention_bias", False)), bool(raw.get("mlp_bias", False))
    config = parse_dense(raw, generation)
    return replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


LLAMA = dense_architecture("Llama 2 and 3.x, Vicuna", parse)
