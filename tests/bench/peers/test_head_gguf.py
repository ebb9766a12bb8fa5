"""A head's GGUF file is read back: llama.cpp's names, layers by their inputs, ids of the target."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from ssd_serve.base.errors import UserError
from ssd_serve.bench.peers.gguf_file import interleaved
from ssd_serve.bench.peers.head_gguf import write_head_gguf
from ssd_serve.recipes.checkpoint import read_checkpoint, write_json
from ssd_serve.recipes.decoder import Shape
from ssd_serve.recipes.eagle3 import TrainedHead
from ssd_serve.recipes.head_export import export_head
from ssd_serve.recipes.head_training import HeadRecipe
from tests.end_to_end.tiny_pair import write_pair

SHAPE = Shape(257, 32, layers=1, heads=2, kv_heads=1, head=16, intermediate=64)
IDS = torch.tensor([1, 2, 5, 9, 200])


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A head of a tiny target, and that target."""
    target, _ = write_pair(tmp_path)
    torch.manual_seed(0)
    export_head(TrainedHead(SHAPE, IDS), HeadRecipe(layers=(0, 2, 3), proposed=len(IDS)), tmp_path / "head")
    return tmp_path / "head", target


def test_every_weight_has_its_place(folders: tuple[Path, Path]) -> None:
    head, target = folders
    write_head_gguf(head, target, head / "head.gguf")
    reader = gguf.GGUFReader(head / "head.gguf")
    keys = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {each.name: each for each in reader.tensors}
    assert keys["general.architecture"] == "eagle3"
    assert keys["eagle3.block_count"] == 1
    assert keys["eagle3.target_layers"] == [1, 3, 4]
    assert keys["eagle3.target_hidden_size"] == 32
    assert len(keys["tokenizer.ggml.tokens"]) == 257
    assert tensors["d2t"].data.tolist() == IDS.tolist()
    weights = read_checkpoint(head).weights
    assert len(tensors) == len(weights) - 1  # one says the same as d2t
    for name, place in (("fc", "fc"), ("lm_head", "output"), ("midlayer.hidden_norm", "blk.0.attn_norm_2")):
        found = tensors[f"{place}.weight"]
        exact = weights[f"{name}.weight"].float().numpy()
        assert np.array_equal(gguf.dequantize(np.array(found.data), found.tensor_type), exact), name
    found = tensors["blk.0.attn_q.weight"]
    exact = interleaved(weights["midlayer.self_attn.q_proj.weight"].float(), 2).numpy()
    assert np.array_equal(gguf.dequantize(np.array(found.data), found.tensor_type), exact)


def test_what_llama_cpp_cannot_compute_is_refused(folders: tuple[Path, Path]) -> None:
    head, target = folders
    config = read_checkpoint(head).config
    write_json(head / "config.json", {**config, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}})
    with pytest.raises(UserError, match="names no three layers"):
        write_head_gguf(head, target, head / "head.gguf")
