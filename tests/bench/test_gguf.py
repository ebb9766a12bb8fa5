"""Tests of the GGUF export, read back: keys, names, shapes, types, and numbers near the checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ssd_serve.base.errors import UserError
from ssd_serve.bench.peers.gguf_writer import interleaved, write_gguf
from ssd_serve.recipes.ballast import add_ballast
from ssd_serve.recipes.checkpoint import read_checkpoint
from tests.end_to_end.tiny_pair import END, write_pair

LAYERS = 3
NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
F32, Q8_0, BF16 = (gguf.GGMLQuantizationType[name] for name in ("F32", "Q8_0", "BF16"))


class File:
    """The contents of a GGUF file."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.keys: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        self.tensors = {each.name: each for each in reader.tensors}

    def weight(self, name: str) -> torch.Tensor:
        """Return the weight with this name in the checkpoint, as llama.cpp computes with it."""
        found = self.tensors[str(NAMES.get_name(name, (".weight",)))]
        return torch.from_numpy(gguf.dequantize(np.array(found.data), found.tensor_type))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny target with ballast; its numbers of heads and KV heads differ."""
    folder = tmp_path_factory.mktemp("gguf")
    source, _ = write_pair(folder)
    add_ballast(source, folder / "ballast", 128, LAYERS)
    return folder / "ballast"


@pytest.fixture(scope="module")
def file(checkpoint: Path) -> File:
    write_gguf(checkpoint, checkpoint / "model.gguf")
    return File(checkpoint / "model.gguf")


@pytest.fixture
def edited(checkpoint: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies the checkpoint with other values in its config or tokenizer."""

    def edit(name: str, **values: object) -> Path:
        for each in ("config.json", "tokenizer.json", "model.safetensors"):
            (tmp_path / each).write_bytes((checkpoint / each).read_bytes())
        old = json.loads((tmp_path / name).read_text(encoding="utf-8"))
        (tmp_path / name).write_text(json.dumps(old | values), encoding="utf-8")
        return tmp_path

    return edit


def test_gguf_header_describes_model_and_vocabulary(checkpoint: Path, file: File) -> None:
    config = read_checkpoint(checkpoint).config
    assert file.keys["general.architecture"] == "llama"
    assert file.keys["general.file_type"] == 32
    assert file.keys["llama.block_count"] == LAYERS
    assert file.keys["llama.embedding_length"] == 128
    assert file.keys["llama.attention.head_count"] == config["num_attention_heads"]
    assert file.keys["llama.attention.head_count_kv"] == config["num_key_value_heads"]
    assert file.keys["llama.rope.freq_base"] == config["rope_theta"]
    assert file.keys["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(config["rms_norm_eps"])
    tokens, kinds = file.keys["tokenizer.ggml.tokens"], file.keys["tokenizer.ggml.token_type"]
    assert len(set(tokens)) == len(kinds) == config["vocab_size"]
    assert tokens[0] == END


@pytest.mark.parametrize("merges", [["a b"], [["a", "b"]]])
def test_gguf_special_tokens_and_merges(edited: Callable[..., Path], merges: list[object]) -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 3}, "merges": merges}
    folder = edited("tokenizer.json", model=model, added_tokens=[{"id": 2, "content": "<|end|>"}])
    write_gguf(folder, folder / "model.gguf")
    keys = File(folder / "model.gguf").keys
    assert keys["tokenizer.ggml.tokens"][:5] == ["a", "b", "<|end|>", "ab", "[unused 4]"]
    assert keys["tokenizer.ggml.token_type"][:5] == [1, 1, 3, 1, 1]
    assert keys["tokenizer.ggml.merges"] == ["a b"]


def test_gguf_weights_have_the_values_of_the_checkpoint(checkpoint: Path, file: File) -> None:
    """Queries and keys are interleaved by their own number of heads."""
    found = read_checkpoint(checkpoint)
    assert len(file.tensors) == len(found.weights)
    for name, weight in found.weights.items():
        stored = file.tensors[str(NAMES.get_name(name, (".weight",)))].tensor_type
        assert stored == (F32 if weight.dim() == 1 else BF16), name
        kept = weight.float() if weight.dim() == 1 else weight.to(torch.bfloat16).float()
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                first, second = kept.view(found.config[heads], 2, -1, kept.shape[1]).unbind(1)
                kept = torch.stack((first, second), 2).reshape(kept.shape)
        assert torch.equal(file.weight(name), kept), name


def test_interleaving_moves_whole_rows() -> None:
    rows = torch.arange(8.0)[:, None].expand(8, 3)
    assert interleaved(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_gguf_matrices_in_blocks_of_eight_bits(checkpoint: Path, tmp_path: Path) -> None:
    write_gguf(checkpoint, tmp_path / "model.gguf", "int8")
    found = File(tmp_path / "model.gguf")
    assert found.keys["general.file_type"] == 7
    assert {each.tensor_type for each in found.tensors.values()} == {F32, Q8_0}
    exact = read_checkpoint(checkpoint).weights["model.embed_tokens.weight"].float()
    # Half a step of the block's scale, and its rounding to fp16.
    step = exact.view(len(exact), -1, 32).abs().amax(2, keepdim=True) / 127
    bound = (0.5 + 127 * 2**-11) * step + 127 * 2**-25
    off = (found.weight("model.embed_tokens.weight") - exact).view(len(exact), -1, 32).abs()
    assert (off <= bound).all()


def test_unsupported_checkpoints_are_refused(edited: Callable[..., Path]) -> None:
    folder = edited("config.json", architectures=["Qwen3ForCausalLM"])
    with pytest.raises(UserError, match="no plain Llama"):
        write_gguf(folder, folder / "model.gguf")
    folder = edited("config.json")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:, :40].contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="cannot be stored as int8"):
        write_gguf(folder, folder / "model.gguf", "int8")
