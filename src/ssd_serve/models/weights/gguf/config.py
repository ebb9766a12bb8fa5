"""The configuration that a GGUF file holds, in the keys of a Hugging Face `config.json`.

Free of torch. What cannot be computed exactly is refused with a `CheckpointError`.
Source of the key names: the GGUF specification (ggml, docs/gguf.md).
"""

from collections.abc import Mapping
from typing import Any

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.config import Json
from ssd_serve.models.weights.gguf.file import StoredTensor

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
INTERLEAVED = ("llama", "mistral")
"""Architectures whose query and key rows are stored with the two halves of a head interleaved."""
ROPE_FACTORS = "rope_freqs.weight"

_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
_MORE = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
_YARN = {
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "original_context_length": "original_max_position_embeddings",
}
_NOT_BUILT = {
    "expert_count": "mixtures of experts",
    "attention.temperature_scale": "attention temperatures",
    "attention.logit_softcapping": "soft caps",
}
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
"""Control tokens that end a turn in every model that has them; files name only one token as the end."""
_CONTROL = 3


def architecture_of(metadata: Json) -> str:
    """Return `general.architecture`. Raises `CheckpointError` for one that is not supported."""
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"the GGUF architecture {name!r} is not supported; supported are {supported}")
    return str(name)


_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""Recommended sampling by its key in `generation_config.json`."""


def config_of(
    metadata: Json, tensors: Mapping[str, StoredTensor], factors: tuple[float, ...] | None
) -> tuple[Json, Json]:
    """Return what stands for `config.json` and `generation_config.json`.

    `factors` are those of the tensor `rope_freqs.weight` (Llama 3.1 and later), None without one.
    """
    name = architecture_of(metadata)
    for key, what in _NOT_BUILT.items():
        if metadata.get(f"{name}.{key}"):
            raise CheckpointError(f"{what} ({name}.{key}) are not built")
    if missing := [key for key in _SIZES if not isinstance(metadata.get(f"{name}.{key}"), int)]:
        raise CheckpointError(f"the GGUF file lacks the number {name}.{missing[0]}")
    raw: dict[str, Any] = {ours: metadata[f"{name}.{key}"] for key, ours in _SIZES.items()}
    raw |= {ours: metadata[f"{name}.{key}"] for key, ours in _MORE.items() if f"{name}.{key}" in metadata}
    raw["architectures"] = [ARCHITECTURES[name]]
    raw["vocab_size"] = _vocabulary(tensors)
    raw["tie_word_embeddings"] = "output.weight" not in tensors
    raw["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if raw.get("sliding_window"):
        if name not in INTERLEAVED:
            raise CheckpointError(
                f"sliding windows ({name}.attention.sliding_window) are not built for {name}"
            )
        raw["architectures"] = [ARCHITECTURES["mistral"]]
    _check_heads(name, metadata, raw)
    if factors is not None:
        if 2 * len(factors) != _head_size(raw):
            raise CheckpointError(f"{ROPE_FACTORS} has {len(factors)} numbers, a head has {_head_size(raw)}")
        raw["rope_scaling"] = {"rope_type": "factors", "factors": list(factors)}
    elif scaling := _rope_scaling(name, metadata):
        raw["rope_scaling"] = scaling
    sampling = {name: metadata[key] for key, name in _SAMPLING.items() if key in metadata}
    sampling = {
        name: round(value, 6) if isinstance(value, float) else value for name, value in sampling.items()
    }
    return raw, {"eos_token_id": list(end_tokens(metadata)), **sampling}


def end_tokens(metadata: Json) -> tuple[int, ...]:
    """Return the ids that end a text: those that the file names, and the known ends of turns."""
    named = (metadata.get(f"tokenizer.ggml.{each}_token_id") for each in ("eos", "eot", "eom"))
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or []
    control = {
        token: index
        for index, (token, kind) in enumerate(
            zip(metadata.get("tokenizer.ggml.tokens") or [], types, strict=False)
        )
        if kind == _CONTROL
    }
    known = (control.get(token) for token in _TURN_ENDS)
    return tuple(dict.fromkeys(each for each in (*named, *known) if isinstance(each, int)))


def _head_size(raw: Json) -> int:
    """Return the numbers in a head."""
    return int(raw.get("head_dim") or raw["hidden_size"] // max(1, raw["num_attention_heads"]))


def _vocabulary(tensors: Mapping[str, StoredTensor]) -> int:
    if (embedding := tensors.get("token_embd.weight")) is None or len(embedding.shape) != 2:
        raise CheckpointError("the GGUF file has no matrix token_embd.weight; is it a whole model?")
    return embedding.shape[0]


def _check_heads(name: str, metadata: Json, raw: Json) -> None:
    for key in ("head_count", "head_count_kv"):
        if isinstance(metadata.get(f"{name}.attention.{key}"), list):
            raise CheckpointError(
                f"numbers of heads that differ by layer ({name}.attention.{key}) are not built"
            )
    if (size := _head_size(raw)) % 2:
        raise CheckpointError(f"heads of {size} numbers have no halves to rotate")
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := metadata.get(f"{name}.{key}", size)) != size:
            raise CheckpointError(f"{name}.{key} is {found} and a head has {size} numbers; that is not built")


def _rope_scaling(name: str, metadata: Json) -> dict[str, Any] | None:
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    factor = float(metadata.get(f"{name}.rope.scaling.factor") or 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"rope scaling {kind!r} is not built; built are linear and yarn")
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        found = {ours: metadata.get(f"{name}.rope.scaling.{key}") for key, ours in _YARN.items()}
        scaling |= {ours: value for ours, value in found.items() if value is not None}
    return scaling
