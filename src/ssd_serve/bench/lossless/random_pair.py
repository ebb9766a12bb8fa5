"""Random tiny checkpoints in Hugging Face layout, without a tokenizer: a target and its noisy copy."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

_VOCABULARY, _HIDDEN, _HEAD, _HEADS, _KV_HEADS, _LAYERS = 199, 64, 16, 4, 2, 2
_SPREAD = 0.25
_SPECIAL: dict[str, dict[str, object]] = {
    "random-llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "random-mistral-window": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 11,
    },
    "random-qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
}
RANDOM_PAIRS = tuple(_SPECIAL)


def write_random_pair(name: str, folder: Path, noise: float = 0.01, heads: int = _HEADS) -> tuple[Path, Path]:
    """Write `target` and `draft` of a random pair below `folder`; its `heads` share two key-value heads."""
    target, draft = folder / "target", folder / "draft"
    _write(name, target, 0.0, heads)
    _write(name, draft, noise, heads)
    return target, draft


def _write(name: str, folder: Path, noise: float, heads: int) -> None:
    folder.mkdir(parents=True)
    config = {
        "vocab_size": _VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config | _SPECIAL[name]), encoding="utf-8")
    save_file(_weights(_shapes(name, heads), noise), folder / "model.safetensors")


def _shapes(name: str, heads: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (_VOCABULARY, _HIDDEN),
        "lm_head.weight": (_VOCABULARY, _HIDDEN),
        "model.norm.weight": (_HIDDEN,),
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        for part, count in (("q", heads), ("k", _KV_HEADS), ("v", _KV_HEADS)):
            shapes[f"{prefix}.self_attn.{part}_proj.weight"] = (count * _HEAD, _HIDDEN)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (_HIDDEN, heads * _HEAD)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (2 * _HIDDEN, _HIDDEN)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (2 * _HIDDEN, _HIDDEN)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (_HIDDEN, 2 * _HIDDEN)
        for norm in ("input", "post_attention"):
            shapes[f"{prefix}.{norm}_layernorm.weight"] = (_HIDDEN,)
        if name == "random-qwen3":
            for part in "qk":
                shapes[f"{prefix}.self_attn.{part}_norm.weight"] = (_HEAD,)
    return shapes


def _weights(shapes: dict[str, tuple[int, ...]], noise: float) -> dict[str, torch.Tensor]:
    """Return weights with logits that are spread enough for sampling to matter."""
    source, disturbing = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        if "norm" in name:
            weights[name] = 0.5 + torch.rand(shape, generator=source)
        else:
            weights[name] = _SPREAD * torch.randn(shape, generator=source)
            weights[name] += noise * torch.randn(shape, generator=disturbing)
    return weights
