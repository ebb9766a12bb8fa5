"""Mistral: Llama without biases, with one sliding window for all layers where it has one."""

from dataclasses import replace

from ssd_serve.models.architectures.dense.config import DecoderConfig, parse_dense
from ssd_serve.models.architectures.dense.decoder import dense_architecture
from ssd_serve.models.config import Json


def parse(raw: Json, generation: Json) -> DecoderConfig:
    """Read `config.json`."""
    config = parse_dense(raw, generation)
    window = int(raw.get("sliding_window") or 0) or None
    return replace(config, windows=(window,) * config.layers)


MISTRAL = dense_architecture("Mistral", parse)
