"""A model read from GGUF computes what transformers computes with the same rounded weights."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from ssd_serve.base.errors import CheckpointError
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.load import ModelOptions, load_model
from ssd_serve.models.rope import inverse_frequencies, parse_rope
from ssd_serve.models.weights.checkpoint import Checkpoint
from tests.models.checkpoints import LLAMA3, make
from tests.models.gguf.files import write_model

WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "initializer_range": 0.05}
KINDS = (
    Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1,
    Kind.Q4_K, Kind.Q5_K, Kind.Q6_K,
)  # fmt: skip


def logits(path: Path, tokens: list[int]) -> torch.Tensor:
    options: Any = {"device": "cpu", "dtype": "fp32", "slots": 64, "context": None}
    model, size = load_model(path, ModelOptions(**options)), len(tokens)
    rows = RequestRows(tokens, range(size), range(size), np.zeros(0, dtype=np.int32), range(size))
    return model.forward(build_batch([rows])).logits


def check(path: Path, model: Any, rounded: dict[str, torch.Tensor]) -> None:
    model.load_state_dict({**model.state_dict(), **rounded})
    model.tie_weights()
    tokens = torch.randint(0, 199, (24,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits(path, tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_type_gives_the_logits_of_its_rounded_weights(tmp_path: Path, kind: Kind) -> None:
    model, path = make("llama", **WIDE), tmp_path / "model.gguf"
    check(path, model, write_model(path, model, lambda _name: kind))


@pytest.mark.parametrize("case", ["llama3-gqa-tied", "mistral-window", "qwen2-biases", "qwen3-qk-norm"])
def test_every_architecture_gives_the_logits_of_transformers(tmp_path: Path, case: str) -> None:
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "sliding_window": None}
    model, path = make(case, **plain), tmp_path / "model.gguf"
    mixed = {"q_proj": Kind.Q8_0, "down_proj": Kind.F16, "embed_tokens": Kind.Q5_1}
    check(path, model, write_model(path, model, lambda name: mixed.get(name.split(".")[-2], Kind.Q4_0)))


def test_rope_factors_of_llama3_give_the_logits_of_transformers(tmp_path: Path) -> None:
    model, path = make("llama3-gqa-tied"), tmp_path / "model.gguf"
    stretched = parse_rope({"rope_parameters": LLAMA3, "max_position_embeddings": 128})
    plain = parse_rope({"rope_theta": LLAMA3["rope_theta"]})
    size = model.config.head_dim
    factors = inverse_frequencies(plain, size) / inverse_frequencies(stretched, size)
    check(path, model, write_model(path, model, lambda _name: Kind.F32, rope_factors=factors.numpy()))


def test_split_files_are_one_model(tmp_path: Path) -> None:
    model, path = make("llama"), tmp_path / "whole.gguf"
    write_model(path, model, lambda _name: Kind.F16)
    reader = gguf.GGUFReader(path)
    for number in (1, 2):
        writer = gguf.GGUFWriter(tmp_path / f"part-0000{number}-of-00002.gguf", "llama")
        if number == 1:
            for key, field in reader.fields.items():
                if key.startswith("llama."):
                    writer.add_key_value(key, field.contents(), field.types[0])
            writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number - 1 :: 2]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    tokens = [5, 6, 7]
    for part in (1, 2):
        found = logits(tmp_path / f"part-0000{part}-of-00002.gguf", tokens)
        assert torch.equal(found, logits(path, tokens))


def test_type_that_is_not_built_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(4)
    writer.add_tensor("token_embd.weight", np.zeros((4, 84), np.uint8), raw_dtype=Kind.Q2_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        CheckpointError, match=r"token_embd\.weight is Q2_K, which is not built; built are F32"
    ):
        Checkpoint(path)


def test_metadata_of_a_wrong_type_is_a_clear_error(tmp_path: Path) -> None:
    model, path = make("llama"), tmp_path / "model.gguf"
    write_model(path, model, lambda _name: Kind.F32, tokenizer={"llama.rope.scaling.factor": "many"})
    with pytest.raises(CheckpointError, match="wrong type or value"):
        load_description(path)
