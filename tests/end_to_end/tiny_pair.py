"""A random target and draft with one tokenizer, in milliseconds, for tests of whole processes."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

END = "<end>"
HEAD = 16


def write_pair(folder: Path, heads: int = 2) -> tuple[Path, Path]:
    """Write `target` and `draft` below the folder. The draft is the target with a little noise. Their `heads`
    share one key-value head."""
    target, draft = folder / "target", folder / "draft"
    write_model(target, seed=1, noise=0.0, heads=heads)
    write_model(draft, seed=1, noise=0.004, heads=heads)
    return target, draft


def write_model(folder: Path, seed: int, noise: float, heads: int = 2) -> None:
    """A Llama checkpoint of one layer in the Hugging Face layout."""
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
        "num_hidden_layers": 1,
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
    save_file(random_weights(hidden, heads * HEAD, vocabulary, seed, noise), folder / "model.safetensors")


def byte_tokenizer() -> Tokenizer:
    """One token a byte."""
    symbols = [END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(tokenizer_models.BPE({symbol: index for index, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def random_weights(
    hidden: int, attention: int, vocabulary: int, seed: int, noise: float
) -> dict[str, torch.Tensor]:
    """Weights whose logits are spread enough for sampling to be interesting."""
    shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
        "model.layers.0.self_attn.q_proj.weight": (attention, hidden),
        "model.layers.0.self_attn.k_proj.weight": (HEAD, hidden),
        "model.layers.0.self_attn.v_proj.weight": (HEAD, hidden),
        "model.layers.0.self_attn.o_proj.weight": (hidden, attention),
        "model.layers.0.mlp.gate_proj.weight": (2 * hidden, hidden),
        "model.layers.0.mlp.up_proj.weight": (2 * hidden, hidden),
        "model.layers.0.mlp.down_proj.weight": (hidden, 2 * hidden),
    }
    source = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=source) * 0.3 for name, shape in shapes.items()}
    for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
        weights[name] = torch.ones(hidden)
    weights["model.layers.0.post_attention_layernorm.weight"] = torch.ones(hidden)
    # The end must not come by chance in the first tokens of a test.
    weights["lm_head.weight"][0] = 0.0
    return {
        name: weight + noise * torch.randn(weight.shape, generator=source) for name, weight in weights.items()
    }
