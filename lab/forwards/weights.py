"""Checkpoints of random numbers in the shape of a well-known model: what they compute is noise, what they
take is not.

Knows the names of Llama's and Qwen's weights, not what is measured.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ssd_serve.bench.document import write
from ssd_serve.errors import UserError
from ssd_serve.plan.known_models import known_config, known_names

_SPREAD = 0.02
_INDEX = "model.safetensors.index.json"


def write_random(name: str, folder: Path, device: str) -> None:
    """Write config and weights in bf16; numbers are drawn on `device`, which is faster than the host.

    Raises `UserError` for a name that is not known.
    """
    config = known_config(name)
    if config is None:
        raise UserError(f"{name} is not known; there are {', '.join(known_names())}")
    folder.mkdir(parents=True)
    home: dict[str, str] = {}
    for place, shapes in enumerate(_files(config)):
        file = f"model-{place:05}.safetensors"
        save_file({key: _random(shape, device) for key, shape in shapes.items()}, folder / file)
        home |= dict.fromkeys(shapes, file)
    write(json.dumps({"weight_map": home}), folder / _INDEX)
    write(json.dumps({**config, "torch_dtype": "bfloat16", "eos_token_id": 0}), folder / "config.json")


def _random(shape: tuple[int, ...], device: str) -> torch.Tensor:
    numbers = torch.randn(shape, device=device, dtype=torch.bfloat16)
    return (1 + _SPREAD * numbers if len(shape) == 1 else _SPREAD * numbers).cpu()


def _files(config: Mapping[str, Any]) -> Iterator[dict[str, tuple[int, ...]]]:
    """The shapes of a file for each layer, and of one for what is beside them."""
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    size = config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    words = (config["vocab_size"], hidden)
    ends: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": words, "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        ends["lm_head.weight"] = words
    yield ends
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (middle, hidden),
        "mlp.up_proj.weight": (middle, hidden),
        "mlp.down_proj.weight": (hidden, middle),
    }
    family = config["architectures"][0]
    if family.startswith("Qwen2"):
        widths = {"q": queries, "k": keys, "v": keys}
        layer |= {f"self_attn.{part}_proj.bias": (width,) for part, width in widths.items()}
    if family.startswith("Qwen3"):
        layer |= {f"self_attn.{part}_norm.weight": (size,) for part in "qk"}
    for number in range(config["num_hidden_layers"]):
        yield {f"model.layers.{number}.{key}": shape for key, shape in layer.items()}
