"""A Llama checkpoint as a GGUF file, which llama.cpp reads: matrices in bf16 or Q8_0, norms in fp32.

Written after the public description of the format, version 3. Knows the checkpoint's layout and the file's,
not llama.cpp. Byte-level BPE tokenizers only, which is what the embedded pair has.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from ssd_serve.errors import UserError
from ssd_serve.recipes.checkpoint import read_checkpoint

ALIGNMENT = 32
_MAGIC, _VERSION = b"GGUF", 3
_UINT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _INT32 = 4, 6, 7, 8, 9, 5
_F32, _Q8_0, _BF16 = 0, 8, 30
_FILE_TYPES = {_Q8_0: 7, _BF16: 32}
_KINDS = {"bf16": _BF16, "Q8_0": _Q8_0}
_BLOCK, _LARGEST = 32, 127
"""Q8_0: blocks of 32 numbers of a row, an fp16 scale before them."""
_NORMAL, _CONTROL = 1, 3

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

Value = str | bool | int | float | list[str] | list[int]
"""What a key of the file's header can hold here."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of the file: its name, shape as torch has it, kind and size in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: int
    size: int


def write_gguf(checkpoint: Path, destination: Path, weights: str = "bf16") -> None:
    """Convert the Hugging Face folder `checkpoint`. `weights`: format of the matrices, bf16 or Q8_0."""
    matrices = _KINDS[weights]
    found = read_checkpoint(checkpoint)
    if found.config.get("architectures") != ["LlamaForCausalLM"] or found.config.get("rope_scaling"):
        raise UserError(f"{checkpoint} is no plain Llama checkpoint; only those are converted to GGUF.")
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    header = model_keys(found.config) | tokenizer_keys(tokenizer, found.config)
    header["general.file_type"] = _FILE_TYPES[matrices]
    heads = int(found.config["num_attention_heads"])
    kv_heads = int(found.config.get("num_key_value_heads") or heads)
    tensors = {gguf_name(name): (name, weight) for name, weight in found.weights.items()}
    entries = [_entry(name, weight, matrices) for name, (_, weight) in tensors.items()]
    with destination.open("wb") as file:
        file.write(header_bytes(header, entries))
        _pad(file)
        for name, weight in tensors.values():
            file.write(_content(name, weight, matrices, heads, kv_heads))
            _pad(file)


def gguf_name(name: str) -> str:
    """The name of a weight in a GGUF file."""
    if name in _NAMES:
        return _NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    kind = _LAYER_NAMES.get(rest.removesuffix(".weight"))
    if kind is None or not layer.isdigit():
        raise UserError(f"the weight {name} has no place in a GGUF file of a Llama model.")
    return f"blk.{layer}.{kind}.weight"


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection, each head's halves interleaved: GGUF rotates neighbouring pairs.

    `weight` is [heads * head size, hidden]; the pair (i, i + half) of a head becomes (2i, 2i + 1).
    """
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def blocks(weight: Tensor) -> Tensor:
    """A matrix in Q8_0, uint8 [outputs, inputs / 32, 34]: each block's scale and its numbers, -127 to 127."""
    if weight.shape[1] % _BLOCK:
        raise UserError(f"Q8_0 needs rows of whole blocks of {_BLOCK}; {weight.shape[1]} inputs are not.")
    values = weight.float().view(weight.shape[0], -1, _BLOCK)
    scales = values.abs().amax(2, keepdim=True) / _LARGEST
    numbers = (values / torch.where(scales > 0, scales, 1.0)).round_().to(torch.int8)
    return torch.cat((scales.half().view(torch.uint8), numbers.view(torch.uint8)), 2)


def model_keys(config: Mapping[str, Any]) -> dict[str, Value]:
    """The header keys that describe the model."""
    heads = int(config["num_attention_heads"])
    head = int(config.get("head_dim") or config["hidden_size"] // heads)
    rope = cast(Mapping[str, Any], config.get("rope_parameters") or {})
    return {
        "general.architecture": "llama",
        "general.name": "ballast",
        "llama.vocab_size": int(config["vocab_size"]),
        "llama.context_length": int(config["max_position_embeddings"]),
        "llama.embedding_length": int(config["hidden_size"]),
        "llama.block_count": int(config["num_hidden_layers"]),
        "llama.feed_forward_length": int(config["intermediate_size"]),
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": int(config.get("num_key_value_heads") or heads),
        "llama.attention.key_length": head,
        "llama.attention.value_length": head,
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "llama.rope.dimension_count": head,
        "llama.rope.freq_base": float(config.get("rope_theta") or rope.get("rope_theta", 10000.0)),
    }


def tokenizer_keys(tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Value]:
    """The header keys that describe a byte-level BPE tokenizer, from its `tokenizer.json`."""
    model = cast(Mapping[str, Any], tokenizer["model"])
    if model.get("type") != "BPE":
        raise UserError("only byte-level BPE tokenizers are converted to GGUF.")
    texts = {number: text for text, number in cast(dict[str, int], model["vocab"]).items()}
    special: set[int] = set()
    for added in cast(list[dict[str, Any]], tokenizer.get("added_tokens") or []):
        texts[added["id"]] = added["content"]
        special.add(added["id"])
    size = int(config["vocab_size"])
    merges = cast(list[str | list[str]], model["merges"])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [texts.get(number, f"[unused {number}]") for number in range(size)],
        "tokenizer.ggml.token_type": [_CONTROL if number in special else _NORMAL for number in range(size)],
        "tokenizer.ggml.merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in merges],
        **{
            f"tokenizer.ggml.{name}_token_id": int(config[f"{name}_token_id"])
            for name in ("bos", "eos")
            if config.get(f"{name}_token_id") is not None
        },
    }


def header_bytes(keys: Mapping[str, Value], entries: Sequence[_Entry]) -> bytes:
    """Everything before the tensors' contents, without the padding that follows."""
    parts = [_MAGIC, struct.pack("<IQQ", _VERSION, len(entries), len(keys))]
    parts += [_text(key) + _value(value) for key, value in keys.items()]
    offset = 0
    for entry in entries:
        sizes = tuple(reversed(entry.shape))
        parts.append(_text(entry.name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
        parts.append(struct.pack("<IQ", entry.kind, offset))
        offset += entry.size + _padding(entry.size)
    return b"".join(parts)


def _value(value: Value) -> bytes:
    if isinstance(value, list):
        kind = _INT32 if value and isinstance(value[0], int) else _STRING
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + b"".join(_items(value))
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    return (
        struct.pack("<If", _FLOAT32, value)
        if isinstance(value, float)
        else struct.pack("<II", _UINT32, value)
    )


def _items(values: list[str] | list[int]) -> Iterator[bytes]:
    for value in values:
        yield _text(value) if isinstance(value, str) else struct.pack("<i", value)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _entry(name: str, weight: Tensor, matrices: int) -> _Entry:
    count = weight.numel()
    sizes = {_F32: 4 * count, _BF16: 2 * count, _Q8_0: count // _BLOCK * (_BLOCK + 2)}
    kind = _F32 if weight.dim() == 1 else matrices
    return _Entry(name, tuple(weight.shape), kind, sizes[kind])


def _content(name: str, weight: Tensor, matrices: int, heads: int, kv_heads: int) -> bytes:
    if weight.dim() == 1:
        return weight.float().contiguous().numpy().tobytes()
    if "q_proj" in name:
        weight = interleaved(weight, heads)
    elif "k_proj" in name:
        weight = interleaved(weight, kv_heads)
    if matrices == _Q8_0:
        return blocks(weight.contiguous()).numpy().tobytes()
    return weight.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()


def _padding(size: int) -> int:
    return -size % ALIGNMENT


def _pad(file: BinaryIO) -> None:
    file.write(bytes(_padding(file.tell())))
