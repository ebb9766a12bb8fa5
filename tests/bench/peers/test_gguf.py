"""The GGUF file is read back by the format's description: keys, names, shapes, kinds, contents, alignment."""

import struct
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ssd_serve.bench.peers.gguf_file import (
    ALIGNMENT,
    blocks,
    gguf_name,
    interleaved,
    tokenizer_keys,
    write_gguf,
)
from ssd_serve.errors import UserError
from ssd_serve.recipes.ballast import add_ballast
from ssd_serve.recipes.checkpoint import read_checkpoint
from tests.end_to_end.tiny_pair import END, write_pair

WIDTHS = {4: "<I", 5: "<i", 6: "<f", 7: "<?"}
STRING, ARRAY = 8, 9
F32, Q8_0, BF16 = 0, 8, 30


@dataclass
class Reader:
    """Reads values one after the other."""

    data: bytes
    at: int = 0

    def plain(self, form: str) -> int:
        found: tuple[int] = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return found[0]

    def text(self) -> str:
        size = self.plain("<Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> object:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner, count = self.plain("<I"), self.plain("<Q")
            return [self.value(inner) for _ in range(count)]
        return self.plain(WIDTHS[kind])


@dataclass
class File:
    keys: dict[str, object]
    tensors: dict[str, tuple[int, torch.Tensor]]


def read(path: Path) -> File:
    reader = Reader(path.read_bytes())
    assert reader.data[:4] == b"GGUF"
    reader.at = 4
    version, count, keys = reader.plain("<I"), reader.plain("<Q"), reader.plain("<Q")
    assert version == 3
    found = {reader.text(): reader.value(reader.plain("<I")) for _ in range(keys)}
    entries: list[tuple[str, list[int], int, int]] = []
    for _ in range(count):
        name = reader.text()
        sizes = [reader.plain("<Q") for _ in range(reader.plain("<I"))]
        entries.append((name, sizes, reader.plain("<I"), reader.plain("<Q")))
    start = reader.at + -reader.at % ALIGNMENT
    tensors: dict[str, tuple[int, torch.Tensor]] = {}
    for name, sizes, kind, offset in entries:
        assert offset % ALIGNMENT == 0, name
        dtype = {F32: torch.float32, BF16: torch.bfloat16, Q8_0: torch.uint8}[kind]
        shape = tuple(reversed(sizes))
        if kind == Q8_0:
            shape = (*shape[:-1], shape[-1] // 32 * 34)
        flat = torch.frombuffer(
            bytearray(reader.data), dtype=dtype, count=torch.Size(shape).numel(), offset=start + offset
        )
        tensors[name] = (kind, flat.reshape(shape))
    return File(found, tensors)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with ballast, whose heads and KV heads differ in number."""
    folder = tmp_path_factory.mktemp("gguf")
    source, _ = write_pair(folder)
    add_ballast(source, folder / "ballast", 128, 3)
    return folder / "ballast"


@pytest.fixture(scope="module")
def file(checkpoint: Path) -> File:
    write_gguf(checkpoint, checkpoint / "model.gguf")
    return read(checkpoint / "model.gguf")


def test_the_header_describes_the_model(checkpoint: Path, file: File) -> None:
    config = read_checkpoint(checkpoint).config
    assert file.keys["general.architecture"] == "llama"
    assert file.keys["llama.block_count"] == 3
    assert file.keys["llama.embedding_length"] == 128
    assert file.keys["llama.attention.head_count"] == config["num_attention_heads"]
    assert file.keys["llama.attention.head_count_kv"] == config["num_key_value_heads"]
    assert file.keys["llama.rope.freq_base"] == config["rope_theta"]
    assert file.keys["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(config["rms_norm_eps"])


def test_the_header_holds_the_whole_vocabulary(checkpoint: Path, file: File) -> None:
    size = read_checkpoint(checkpoint).config["vocab_size"]
    tokens, kinds = file.keys["tokenizer.ggml.tokens"], file.keys["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    assert len(set(map(str, tokens))) == len(kinds) == size
    assert tokens[0] == END


def test_special_tokens_are_marked_and_merges_are_pairs() -> None:
    added = [{"id": 2, "content": "<|end|>"}]
    for merges in (["a b"], [["a", "b"]]):
        model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 3}, "merges": merges}
        keys = tokenizer_keys({"model": model, "added_tokens": added}, {"vocab_size": 5, "bos_token_id": 2})
        assert keys["tokenizer.ggml.tokens"] == ["a", "b", "<|end|>", "ab", "[unused 4]"]
        assert keys["tokenizer.ggml.token_type"] == [1, 1, 3, 1, 1]
        assert keys["tokenizer.ggml.merges"] == ["a b"]
        assert keys["tokenizer.ggml.bos_token_id"] == 2
        assert "tokenizer.ggml.eos_token_id" not in keys


def test_every_weight_is_there_once_with_its_shape(checkpoint: Path, file: File) -> None:
    weights = read_checkpoint(checkpoint).weights
    assert len(file.tensors) == len(weights)
    for name, weight in weights.items():
        kind, found = file.tensors[gguf_name(name)]
        assert found.shape == weight.shape, name
        assert kind == (F32 if weight.dim() == 1 else BF16), name


def test_weights_keep_their_values(checkpoint: Path, file: File) -> None:
    weights = read_checkpoint(checkpoint).weights
    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.down_proj.weight"):
        _, found = file.tensors[gguf_name(name)]
        assert torch.equal(found, weights[name].to(found.dtype)), name


def test_matrices_can_be_blocks_of_eight_bits(checkpoint: Path, file: File, tmp_path: Path) -> None:
    write_gguf(checkpoint, tmp_path / "model.gguf", "Q8_0")
    found = read(tmp_path / "model.gguf")
    assert (found.keys["general.file_type"], file.keys["general.file_type"]) == (7, 32)
    assert {kind for kind, _ in found.tensors.values()} == {F32, Q8_0}
    for name, weight in read_checkpoint(checkpoint).weights.items():
        kind, data = found.tensors[gguf_name(name)]
        if kind == F32 or "q_proj" in name or "k_proj" in name:
            continue  # norms are the same, and rows that move have a test of their own
        parts = data.view(weight.shape[0], -1, 34)
        scales = parts[..., :2].contiguous().view(torch.float16).float()
        numbers = parts[..., 2:].contiguous().view(torch.int8).float()
        values = weight.float().view(weight.shape[0], -1, 32)
        # Half a step, and up to 127 of fp16's rounding of the scale.
        bound = (0.5 + 127 * 2**-11) * scales + 127 * 2**-25
        assert ((numbers * scales - values).abs() <= bound).all(), name
        assert numbers.abs().max() == (127 if weight.any() else 0)


def test_blocks_of_zeros_stay_zeros_and_rows_must_be_whole_blocks() -> None:
    assert not blocks(torch.zeros((2, 64))).any()
    with pytest.raises(UserError, match="blocks of 32"):
        blocks(torch.zeros((2, 40)))


def test_queries_and_keys_are_interleaved_by_their_own_number_of_heads(checkpoint: Path, file: File) -> None:
    found = read_checkpoint(checkpoint)
    for name, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        weight = found.weights[f"model.layers.0.self_attn.{name}.weight"].to(torch.bfloat16)
        _, stored = file.tensors[gguf_name(f"model.layers.0.self_attn.{name}.weight")]
        size = weight.shape[0] // found.config[heads]
        for head in range(found.config[heads]):
            for pair in range(size // 2):
                row = head * size
                assert torch.equal(stored[row + 2 * pair], weight[row + pair])
                assert torch.equal(stored[row + 2 * pair + 1], weight[row + size // 2 + pair])


def test_interleaving_moves_whole_rows() -> None:
    rows = torch.arange(8.0)[:, None].expand(8, 3)
    assert interleaved(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_what_has_no_place_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no place"):
        gguf_name("model.layers.0.self_attn.q_proj.bias")
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}', encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match="no plain Llama"):
        write_gguf(tmp_path, tmp_path / "model.gguf")
