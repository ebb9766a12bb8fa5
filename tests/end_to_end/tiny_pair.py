"""Writes small random targets, drafts and EAGLE heads with one tokenizer, for tests of whole processes."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

END = "<end>"
HEAD = 16


def write_pair(folder: Path, heads: int = 2, layers: int = 1) -> tuple[Path, Path]:
    """Write `target` and `draft` below the folder; the draft is the target with a little noise.

    All `heads` share one key-value head.
    """
    target, draft = folder / "target", folder / "draft"
    write_model(target, seed=1, noise=0.0, heads=heads, layers=layers)
    write_model(draft, seed=1, noise=0.004, heads=heads, layers=layers)
    return target, draft


def write_model(folder: Path, seed: int, noise: float, heads: int = 2, layers: int = 1) -> None:
    """Write a Llama checkpoint in the Hugging Face layout."""
    folder.mkdir(parents=True)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    hidden, vocabulary = 32, tokenizer.get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.token_to_id(END),
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = random_weights(hidden, heads * HEAD, vocabulary, layers, torch.Generator().manual_seed(seed))
    disturbing = torch.Generator().manual_seed(seed + 1)
    for weight in weights.values():
        weight += noise * torch.randn(weight.shape, generator=disturbing)
    save_file(weights, folder / "model.safetensors")


def write_head(folder: Path, target: Path, proposed: range) -> Path:
    """Write a random EAGLE-3 head in the flat layout, which uses the target's embedding.

    It proposes only the target's tokens in `proposed`.
    """
    hidden = read_config(target)["hidden_size"]
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm")
    shapes = {"fc": (hidden, 3 * hidden), "lm_head": (len(proposed), hidden)}
    weights = {f"{name}.weight": torch.ones(hidden) for name in norms}
    weights["d2t"] = torch.tensor(proposed) - torch.arange(len(proposed))
    kind = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(proposed)}
    return _write_layer(folder, target, "midlayer", 2 * hidden, shapes, weights, kind)


def write_peagle(folder: Path, target: Path) -> Path:
    """Write a random P-EAGLE head of two layers for three positions, which uses the target's embedding."""
    hidden, vocabulary = read_config(target)["hidden_size"], read_config(target)["vocab_size"]
    norms = ("layers.0.hidden_norm", "layers.0.input_layernorm", "layers.1.input_layernorm", "norm")
    shapes = {"fc": (hidden, 3 * hidden), "lm_head": (vocabulary, hidden)}
    weights = {f"{name}.weight": torch.ones(hidden) for name in norms}
    weights["mask_hidden"] = torch.randn((1, 1, 3 * hidden), generator=torch.Generator().manual_seed(2))
    masks = {"ptd_token_id": vocabulary - 1, "num_depths": 3}
    kind = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 2, **masks}
    _write_layer(folder, target, "layers.0", 2 * hidden, shapes, weights, kind)
    written = load_file(folder / "model.safetensors")
    for name in [name for name in written if name.startswith("layers.0.") and "hidden_norm" not in name]:
        reads = hidden if name.split(".")[-2] in {"q_proj", "k_proj", "v_proj"} else None
        written[name.replace("layers.0", "layers.1")] = written[name][..., :reads].clone()
    save_file(written, folder / "model.safetensors")
    return folder


def write_first_head(folder: Path, target: Path) -> Path:
    """Write a random EAGLE-1 head, which uses the target's embedding and LM head.

    Only its tensors distinguish it from a model with one layer.
    """
    hidden = read_config(target)["hidden_size"]
    return _write_layer(folder, target, "layers.0", hidden, {"fc": (hidden, 2 * hidden)}, {}, {})


def write_gumiho(folder: Path, target: Path, heads: int = 2) -> Path:
    """Write a random Gumiho head, with the target's LM head and embedding."""
    config = read_config(target)
    hidden, wide, keys = config["hidden_size"], config["intermediate_size"], HEAD
    queries = config["num_attention_heads"] * HEAD
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,)}
    for layer in ("layers.0", "layers.1"):
        sizes = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": shape for name, shape in sizes.items()}
        sizes = {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": shape for name, shape in sizes.items()}
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    shapes["layers.1.input_layernorm.weight"] = (hidden,)
    for head in range(heads):
        for block in range(6):
            shapes[f"mlp.{head}.{block}.linear.weight"] = (hidden, hidden if block else 2 * hidden)
            shapes[f"mlp.{head}.{block}.linear.bias"] = (hidden,)
    return _write_heads(folder, "model", shapes, config | {"num_hidden_layers": 2}, scale=0.1)


def write_pard(folder: Path, draft: Path, outputs: int = 0) -> Path:
    """Write the draft with a mask token; with `outputs` as PARD-2, which reads so many first outputs of its target."""
    shutil.copytree(draft, folder)
    config, tensors = read_config(draft), load_file(draft / "model.safetensors")
    hidden, width = config["hidden_size"], outputs * config["hidden_size"]
    keys: dict[str, Any] = {"pard_token": 200, "pard_k": 3}
    if outputs:
        layers = [-1, *range(1, outputs)]
        keys |= {"spd_type": "pard2", "pard2_target_dim": width, "pard2_target_layers": layers}
        tensors["target_proj.weight"] = torch.randn(
            (hidden, width), generator=torch.Generator().manual_seed(1)
        )
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


def write_medusa(folder: Path, target: Path, heads: int = 3) -> Path:
    """Write random Medusa heads in the original layout."""
    shapes: dict[str, tuple[int, ...]] = {}
    hidden, vocabulary = read_config(target)["hidden_size"], read_config(target)["vocab_size"]
    for head in range(heads):
        shapes |= {f"{head}.0.linear.weight": (hidden, hidden), f"{head}.0.linear.bias": (hidden,)}
        shapes[f"{head}.1.weight"] = (vocabulary, hidden)
    return _write_heads(folder, "medusa_lm_head", shapes, {"medusa_num_heads": 2, "medusa_num_layers": 1})


def write_hydra(folder: Path, target: Path, heads: int = 3) -> Path:
    """Write random Hydra heads of one layer."""
    shapes: dict[str, tuple[int, ...]] = {}
    hidden, vocabulary = read_config(target)["hidden_size"], read_config(target)["vocab_size"]
    for head in range(heads):
        for name in ("linear", "res_connection"):
            shapes[f"hydra_mlp.{head}.0.{name}.weight"] = (hidden, (head + 2) * hidden)
            shapes[f"hydra_mlp.{head}.0.{name}.bias"] = (hidden,)
        shapes |= {
            f"hydra_lm_head.{head}.weight": (vocabulary, hidden),
            f"hydra_lm_head.{head}.bias": (vocabulary,),
        }
    kind = {"hydra_num_heads": heads, "hydra_num_layers": 1, "hydra_head_arch": "mlp", "grounded_heads": True}
    return _write_heads(folder, "model", shapes, kind)


def write_dflash(folder: Path, target: Path, dspark: bool = False) -> Path:
    """Write a random DFlash head in z-lab's layout, or a DSpark head in DeepSeek's, with blocks of 4 rows.

    In mode async it has anchors besides roots.
    """
    config = read_config(target)
    hidden, wide, vocabulary = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    queries, keys = (config[f"num_{each}_heads"] * HEAD for each in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
    shapes |= {f"{name}.weight": (hidden,) for name in ("hidden_norm", "norm")}
    for name, (outputs, inputs) in {
        **{"self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden)},
        **{"self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries)},
        **{f"mlp.{each}_proj": (wide, hidden) for each in ("gate", "up")},
        "mlp.down_proj": (hidden, wide),
    }.items():
        shapes[f"layers.0.{name}.weight"] = (outputs, inputs)
    shapes |= {f"layers.0.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shapes |= {f"layers.0.self_attn.{each}_norm.weight": (HEAD,) for each in ("q", "k")}
    own: dict[str, Any] = {"target_layer_ids": [0, 2], "mask_token_id": 200, "draft_ahead": True}
    own["context_gap"] = not dspark
    kind: dict[str, Any] = {"architectures": ["DFlashDraftModel"], "dflash_config": own}
    if dspark:
        shapes |= {f"markov_head.markov_{each}.weight": (vocabulary, 4) for each in ("w1", "w2")}
        kind = {"architectures": ["Qwen3DSparkModel"], "markov_rank": 4, **own}
    whole = config | kind | {"model_type": "qwen3", "num_hidden_layers": 1, "block_size": 4}
    return _write_heads(folder, "model", shapes, whole)


def _write_heads(
    folder: Path, file: str, shapes: dict[str, tuple[int, ...]], kind: dict[str, Any], scale: float = 0.3
) -> Path:
    folder.mkdir(parents=True)
    source = torch.Generator().manual_seed(2)
    save_file(
        {name: scale * torch.randn(shape, generator=source) for name, shape in shapes.items()},
        folder / f"{file}.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(kind))
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def _write_layer(
    folder: Path,
    target: Path,
    layer: str,
    inputs: int,
    shapes: dict[str, tuple[int, int]],
    weights: dict[str, torch.Tensor],
    kind: dict[str, Any],
) -> Path:
    """Write a layer of the target's shape with attention inputs of size `inputs`, and further matrices and tensors."""
    folder.mkdir(parents=True)
    config = read_config(target)
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = shapes | {
        f"{layer}.self_attn.q_proj": (queries, inputs),
        f"{layer}.self_attn.k_proj": (keys, inputs),
        f"{layer}.self_attn.v_proj": (keys, inputs),
        f"{layer}.self_attn.o_proj": (hidden, queries),
        f"{layer}.mlp.gate_proj": (wide, hidden),
        f"{layer}.mlp.up_proj": (wide, hidden),
        f"{layer}.mlp.down_proj": (hidden, wide),
    }
    source = torch.Generator().manual_seed(1)
    weights = weights | {
        f"{name}.weight": 0.05 * torch.randn(shape, generator=source) for name, shape in shapes.items()
    }
    weights[f"{layer}.post_attention_layernorm.weight"] = torch.ones(hidden)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1} | kind))
    return folder


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with a token for each byte."""
    symbols = [END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(tokenizer_models.BPE({symbol: index for index, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def random_weights(
    hidden: int, attention: int, vocabulary: int, layers: int, source: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return random weights, scaled so that the logits are neither flat nor concentrated on one token."""
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    for layer in range(layers):
        shapes |= {
            f"model.layers.{layer}.self_attn.q_proj.weight": (attention, hidden),
            f"model.layers.{layer}.self_attn.k_proj.weight": (HEAD, hidden),
            f"model.layers.{layer}.self_attn.v_proj.weight": (HEAD, hidden),
            f"model.layers.{layer}.self_attn.o_proj.weight": (hidden, attention),
            f"model.layers.{layer}.mlp.gate_proj.weight": (2 * hidden, hidden),
            f"model.layers.{layer}.mlp.up_proj.weight": (2 * hidden, hidden),
            f"model.layers.{layer}.mlp.down_proj.weight": (hidden, 2 * hidden),
        }
    weights = {name: torch.randn(shape, generator=source) * 0.3 for name, shape in shapes.items()}
    weights["model.norm.weight"] = torch.ones(hidden)
    for layer in range(layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden)
    # The end token must not come by chance among the first tokens of a test.
    weights["lm_head.weight"][0] = 0.0
    return weights
