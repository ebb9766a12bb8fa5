"""Writes GGUF files for tests, with the packing of the `gguf` package: model, tokenizer, one type a tensor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

NAMES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
K_BLOCKS = (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)


def packed(weight: torch.Tensor, kind: Kind, random: np.random.Generator) -> np.ndarray:
    """Pack a matrix; k-quants, which the package cannot pack, get random blocks with small scales."""
    if kind not in K_BLOCKS:
        return gguf.quantize(weight.float().numpy(), kind)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = weight.shape
    blocks = random.integers(0, 256, (rows, columns // numbers, size), dtype=np.uint8)
    largest = 2e-5 if kind is Kind.Q6_K else 2e-3
    scales = (random.random((rows, columns // numbers, 2)) * largest).astype(np.float16).view(np.uint8)
    if kind is Kind.Q6_K:
        blocks[..., -2:] = scales[..., :2]
    else:
        blocks[..., :4] = scales
    return blocks.reshape(rows, -1)


def write_model(
    path: Path,
    model: Any,
    kind_of: Callable[[str], Kind],
    *,
    tokenizer: dict[str, Any] | None = None,
    rope_factors: np.ndarray | None = None,
) -> dict[str, torch.Tensor]:
    """Write a transformers model; return its weights as the file's blocks round them, by their names."""
    config, random = model.config, np.random.default_rng(7)
    kind = config.model_type
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    writer = gguf.GGUFWriter(path, "llama" if kind == "mistral" else kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if (size := getattr(config, "head_dim", None)) is not None:
        writer.add_key_length(size)
        writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in (tokenizer or {}).items():
        add(writer, key, value)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, NAMES[kind]), config.num_hidden_layers)
    rounded: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        chosen = kind_of(name) if weight.dim() == 2 else Kind.F32
        data = packed(weight, chosen, random)
        rounded[name] = torch.from_numpy(np.array(gguf.dequantize(data, chosen), np.float32))
        part = name.split(".")[-2]
        if kind in ("llama", "mistral") and part in heads:
            data = interleaved(data, heads[part])
        writer.add_tensor(str(names.get_name(name, (".weight", ".bias"))), data, raw_dtype=chosen)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return rounded


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Put the pair (i, i + half) of each head at (2i, 2i + 1), as llama.cpp's converter does."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a metadata entry with the type of its value."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def byte_level(tokenizer_json: str, pre: str, **more: Any) -> dict[str, Any]:
    """Return the metadata of a byte-level BPE tokenizer, as converters write it."""
    data = json.loads(tokenizer_json)
    added = {each["id"]: each for each in data["added_tokens"]}
    vocabulary = {index: token for token, index in data["model"]["vocab"].items()}
    vocabulary |= {index: each["content"] for index, each in added.items()}
    kinds = [1 if i not in added else 3 if added[i]["special"] else 4 for i in range(len(vocabulary))]
    merges = [each if isinstance(each, str) else " ".join(each) for each in data["model"]["merges"]]
    found = {"model": "gpt2", "pre": pre, "merges": merges, "token_type": kinds}
    found["tokens"] = [vocabulary[i] for i in range(len(vocabulary))]
    return {f"tokenizer.ggml.{key}": value for key, value in {**found, **more}.items()}
