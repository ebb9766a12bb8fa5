"""An EAGLE-3 head as a GGUF file, which llama.cpp reads beside its target's: as its own converter writes it.

The flat layout that `ssd recipe eagle3` exports, without norms of EAGLE-3.1. A head's layers are named by
their outputs, llama.cpp's by their inputs.
"""

import json
from pathlib import Path

import gguf
import numpy as np

from ssd_serve.base.errors import UserError
from ssd_serve.bench.peers.gguf_file import describe_model, describe_tokenizer, interleaved, kv_heads
from ssd_serve.recipes.checkpoint import read_checkpoint

_ARCHITECTURE = "eagle3"
_NAMES = {
    "embed_tokens": "token_embd",
    "fc": "fc",
    "norm": "output_norm",
    "lm_head": "output",
    "midlayer.input_layernorm": "blk.0.attn_norm",
    "midlayer.hidden_norm": "blk.0.attn_norm_2",
    "midlayer.self_attn.q_proj": "blk.0.attn_q",
    "midlayer.self_attn.k_proj": "blk.0.attn_k",
    "midlayer.self_attn.v_proj": "blk.0.attn_v",
    "midlayer.self_attn.o_proj": "blk.0.attn_output",
    "midlayer.post_attention_layernorm": "blk.0.ffn_norm",
    "midlayer.mlp.gate_proj": "blk.0.ffn_gate",
    "midlayer.mlp.up_proj": "blk.0.ffn_up",
    "midlayer.mlp.down_proj": "blk.0.ffn_down",
}


def write_head_gguf(head: Path, target: Path, destination: Path) -> None:
    """Convert a head with bf16 matrices; its tokenizer is the target's. Raises `UserError` for a head that
    llama.cpp cannot compute, or that names no layers."""
    found = read_checkpoint(head)
    config = found.config
    layers = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not layers or len(layers) != 3:
        raise UserError(f"{head} names no three layers of its target; llama.cpp needs as many.")
    writer = gguf.GGUFWriter(destination, _ARCHITECTURE)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    describe_model(writer, config)
    writer.add_array(f"{_ARCHITECTURE}.target_layers", [layer + 1 for layer in layers])
    writer.add_uint32(
        f"{_ARCHITECTURE}.target_hidden_size", int(config.get("target_hidden_size") or config["hidden_size"])
    )
    theirs = read_checkpoint(target).config
    tokenizer = json.loads((target / "tokenizer.json").read_text(encoding="utf-8"))
    describe_tokenizer(writer, tokenizer, {**theirs, "vocab_size": config["vocab_size"]})
    rotated = {"q_proj": int(config["num_attention_heads"]), "k_proj": kv_heads(config)}
    for name, weight in found.weights.items():
        if name == "t2d":
            continue  # says the same as d2t
        if name == "d2t":
            ids = weight.numpy().astype(np.int64) + np.arange(len(weight))
            writer.add_tensor(name, ids, raw_dtype=gguf.GGMLQuantizationType.I64)
            continue
        place = _NAMES.get(name.removesuffix(".weight"))
        if place is None:
            raise UserError(f"the weight {name} has no place in a GGUF file of an EAGLE-3 head.")
        heads = next((count for part, count in rotated.items() if part in name), None)
        rows = weight.float() if heads is None else interleaved(weight.float(), heads)
        kind = gguf.GGMLQuantizationType.BF16 if rows.dim() > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{place}.weight", gguf.quantize(rows.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
