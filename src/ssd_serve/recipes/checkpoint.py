"""Checkpoints in Hugging Face layout: `config.json`, safetensors files and the folder around them."""

import json
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from ssd_serve.base.errors import UserError
from ssd_serve.models.rope import parse_rope
from ssd_serve.recipes.decoder import Shape

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "held_out.json",
)


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copy the files that stay the same when a checkpoint's weights are rewritten."""
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


@dataclass(frozen=True)
class LlamaCheckpoint:
    """The parsed `config.json` of a Llama checkpoint, and every weight by name."""

    config: dict[str, Any]
    weights: dict[str, Tensor]


def read_checkpoint(folder: Path) -> LlamaCheckpoint:
    """Read `config.json` and all safetensors files of `folder`."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} is not a checkpoint: it has no config.json.")
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} has no .safetensors weights.")
    weights: dict[str, Tensor] = {}
    for file in files:
        weights.update(load_file(file))
    return LlamaCheckpoint(config, weights)


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Return the sizes that a Llama `config.json` declares.

    Raises `UserError` for anything that the training decoder cannot compute.
    """
    if config.get("architectures") != ["LlamaForCausalLM"]:
        raise UserError(f"Only LlamaForCausalLM is supported here, not {config.get('architectures')}.")
    if config.get("attention_bias") or config.get("mlp_bias") or config.get("hidden_act", "silu") != "silu":
        raise UserError("Biases and activations other than silu are not supported here.")
    rope = parse_rope(dict(config))
    heads = int(config["num_attention_heads"])
    return Shape(
        vocabulary=int(config["vocab_size"]),
        hidden=int(config["hidden_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head=int(config.get("head_dim") or config["hidden_size"] // heads),
        intermediate=int(config["intermediate_size"]),
        context=int(config["max_position_embeddings"]),
        rope_theta=rope.theta,
        epsilon=float(config["rms_norm_eps"]),
        scaled=None if rope.kind == "default" else rope,
    )


def llama_config(shape: Shape) -> dict[str, Any]:
    """Return the `config.json` of a decoder with weights in bf16."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.epsilon,
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def write_weights(weights: dict[str, Tensor], folder: Path) -> None:
    """Write `model.safetensors` with the file mode of `config.json`; safetensors itself writes mode 0600."""
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod((folder / "config.json").stat().st_mode & 0o777)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def replaced_folder(folder: Path) -> Generator[Path]:
    """Yield a new empty folder that replaces `folder` when the block ends without an error."""
    part = folder.with_name(folder.name + ".part")
    old = folder.with_name(folder.name + ".old")
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in (part, old):
        shutil.rmtree(leftover, ignore_errors=True)
    part.mkdir()
    yield part
    if folder.exists():
        os.rename(folder, old)
    os.rename(part, folder)
    shutil.rmtree(old, ignore_errors=True)
