"""Writes a Llama checkpoint as a GGUF file for llama.cpp: matrices in bf16 or Q8_0, norms in fp32.

llama.cpp's own converter does not know the embedded pair's tokenizer. Byte-level BPE tokenizers only.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import gguf
from torch import Tensor

from ssd_serve.base.errors import UserError
from ssd_serve.recipes.checkpoint import read_checkpoint

_MATRICES = {"bf16": gguf.GGMLQuantizationType.BF16, "int8": gguf.GGMLQuantizationType.Q8_0}
_FILE_TYPES = {"bf16": gguf.LlamaFileType.MOSTLY_BF16, "int8": gguf.LlamaFileType.MOSTLY_Q8_0}


def write_gguf(checkpoint: Path, destination: Path, weights: str = "bf16") -> None:
    """Convert a Hugging Face folder, with matrices in `weights`: bf16, or int8 (Q8_0).

    Raises `UserError` for anything but a plain Llama checkpoint, and for rows without whole Q8_0 blocks.
    """
    found = read_checkpoint(checkpoint)
    config = found.config
    if config.get("architectures") != ["LlamaForCausalLM"] or config.get("rope_scaling"):
        raise UserError(f"{checkpoint} is no plain Llama checkpoint; only those are converted to GGUF.")
    writer = gguf.GGUFWriter(destination, "llama")
    writer.add_file_type(_FILE_TYPES[weights])
    _describe_model(writer, config)
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    _describe_tokenizer(writer, tokenizer, config)
    heads = {
        "q_proj": int(config["num_attention_heads"]),
        "k_proj": int(config.get("num_key_value_heads") or config["num_attention_heads"]),
    }
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, int(config["num_hidden_layers"]))
    for name, weight in found.weights.items():
        rotated = next((count for part, count in heads.items() if part in name), None)
        rows = weight.float() if rotated is None else interleaved(weight.float(), rotated)
        kind = _MATRICES[weights] if rows.dim() > 1 else gguf.GGMLQuantizationType.F32
        try:
            data = gguf.quantize(rows.numpy(), kind)
        except gguf.QuantError as error:
            raise UserError(f"{name} cannot be stored as {weights}: {error}") from error
        writer.add_tensor(str(names.get_name(name, (".weight",))), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Interleave the halves of each head of a query or key projection: GGUF rotates neighbouring pairs.

    `weight` is [heads * head size, hidden]; the pair (i, i + half) of a head becomes (2i, 2i + 1).
    """
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def _describe_model(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    heads = int(config["num_attention_heads"])
    head = int(config.get("head_dim") or config["hidden_size"] // heads)
    rope = cast(Mapping[str, Any], config.get("rope_parameters") or {})
    writer.add_name("ballast")
    writer.add_vocab_size(int(config["vocab_size"]))
    writer.add_context_length(int(config["max_position_embeddings"]))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_block_count(int(config["num_hidden_layers"]))
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.get("num_key_value_heads") or heads))
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(float(config.get("rope_theta") or rope.get("rope_theta", 10000.0)))


def _describe_tokenizer(
    writer: gguf.GGUFWriter, tokenizer: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    model = cast(Mapping[str, Any], tokenizer["model"])
    if model.get("type") != "BPE":
        raise UserError("only byte-level BPE tokenizers are converted to GGUF.")
    added = {each["id"]: each["content"] for each in tokenizer.get("added_tokens") or ()}
    texts = {number: text for text, number in cast(dict[str, int], model["vocab"]).items()} | added
    size = range(int(config["vocab_size"]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([texts.get(number, f"[unused {number}]") for number in size])
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if number in added else kinds.NORMAL for number in size])
    merges = cast(list[str | list[str]], model["merges"])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    if config.get("bos_token_id") is not None:
        writer.add_bos_token_id(int(config["bos_token_id"]))
    if config.get("eos_token_id") is not None:
        writer.add_eos_token_id(int(config["eos_token_id"]))
