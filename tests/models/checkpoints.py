"""Small random checkpoints of every supported architecture, made with transformers, and its own logits."""

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

SMALL = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama3-gqa-tied": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear-biases": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 24,
        },
    ),
    "mistral-window": ("Mistral", {"sliding_window": 11, "num_key_value_heads": 1}),
    "qwen2-biases": ("Qwen2", {"rope_parameters": YARN}),
    "qwen2-mixed-windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3-qk-norm": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}


def make(name: str, **changes: Any) -> Any:
    """A transformers model of a case, random in every tensor (norms and biases too), in fp32."""
    family, special = CASES[name]
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **special, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.uniform_(0.5, 1.5)
            elif key.endswith("bias"):
                parameter.normal_(0, 0.3)
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Write a checkpoint in the Hugging Face layout."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        # The library warns about its own defaults while it writes; what matters here is the folder.
        warnings.filterwarnings("ignore", module=r"transformers\..*|huggingface_hub\..*")
        model.save_pretrained(folder, **options)
    return folder


def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """transformers' logits of every position: float32 [tokens, vocabulary]."""
    with torch.inference_mode():
        result: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return result
