"""Reading weights: layouts, slices, and every way in which a folder can be damaged."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ssd_serve.base.errors import CheckpointError
from ssd_serve.base.logs import Logger
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.models.heads.load import target_head
from ssd_serve.models.interface import Model
from ssd_serve.models.load import ModelOptions, load_model
from ssd_serve.models.parallel import Parallel
from ssd_serve.models.weights.checkpoint import Checkpoint
from ssd_serve.models.weights.linear import LinearFactory, MatrixShare
from tests.models import checkpoints

WEIGHT = torch.arange(24.0).view(6, 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama in four shards."""
    return checkpoints.save(checkpoints.make("llama"), tmp_path / "llama", max_shard_size="150KB")


def load(folder: Path, *, allow_pickle: bool = False) -> Model:
    """Load with a small cache."""
    return load_model(
        folder, ModelOptions(device="cpu", dtype="fp32", slots=8, context=8, allow_pickle=allow_pickle)
    )


def logits(model: Model) -> torch.Tensor:
    rows = RequestRows(
        tokens=[3, 141, 59, 26],
        positions=range(4),
        write_slots=range(4),
        prefix_slots=np.empty(0, dtype=np.int32),
        wanted=range(4),
    )
    return model.forward(build_batch([rows])).logits.clone()


def write(folder: Path, layout: str) -> Path:
    folder.mkdir(exist_ok=True)
    if layout.endswith(".safetensors"):
        save_file({"a.weight": WEIGHT}, folder / layout)
    else:
        torch.save({"a.weight": WEIGHT}, folder / layout, _use_new_zipfile_serialization="old" not in layout)
    if layout not in ("model.safetensors", "pytorch_model.bin"):
        kind = "model.safetensors" if layout.endswith(".safetensors") else "pytorch_model.bin"
        (folder / f"{kind}.index.json").write_text(json.dumps({"weight_map": {"a.weight": layout}}))
    return folder


@pytest.mark.parametrize(
    "layout", ["model.safetensors", "one-of-one.safetensors", "pytorch_model.bin", "shard.bin", "old.bin"]
)
def test_layouts_and_slices(tmp_path: Path, layout: str) -> None:
    with Checkpoint(write(tmp_path, layout), allow_pickle=True) as checkpoint:
        assert "a.weight" in checkpoint
        assert torch.equal(checkpoint.read("a.weight", (6, 4)), WEIGHT)
        assert torch.equal(checkpoint.read("a.weight", (6, 4), rows=slice(2, 4)), WEIGHT[2:4])
        part = checkpoint.read("a.weight", (6, 4), columns=slice(1, 3))
        checkpoint.finish()
    assert torch.equal(part, WEIGHT[:, 1:3])  # outlives the file


def test_missing_unexpected_and_misshapen(tmp_path: Path) -> None:
    with Checkpoint(write(tmp_path, "model.safetensors")) as checkpoint:
        with pytest.raises(CheckpointError, match=r"lacks 2 tensors: b, c"):
            checkpoint.require(["a.weight", "b", "c"])
        with pytest.raises(
            CheckpointError, match=r"a\.weight has shape \(6, 4\), config\.json says \(4, 4\)"
        ):
            checkpoint.read("a.weight", (4, 4))
        with pytest.raises(CheckpointError, match=r"holds 1 tensors .* does not have: a\.weight"):
            checkpoint.finish()


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
def test_stored_head_of_tied_model_is_used_where_it_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype | None
) -> None:
    theirs = checkpoints.make("llama3-gqa-tied")
    folder = checkpoints.save(theirs, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    if dtype is not None:
        head = (head + torch.eye(*head.shape)).to(dtype)
    tensors |= {"lm_head.weight": head, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(tensors, folder / "model.safetensors")
    options = ModelOptions(device="cpu", dtype="fp32", slots=8, context=8)
    ours = load_model(folder, options, log=Logger("test"))
    theirs.lm_head.weight = torch.nn.Parameter(head.float())
    expected = checkpoints.logits(theirs, [3, 141, 59, 26])
    torch.testing.assert_close(logits(ours), expected, atol=1e-4, rtol=0)
    said = capsys.readouterr().err
    assert ("lm_head.weight differs from it: lm_head.weight is used" in said) == (dtype is not None)
    assert "1 tensors are not read, since they follow from config.json: model.layers.0" in said
    used = target_head(folder, 199, 64)
    assert torch.equal(used, head)


def test_fused_matrix(tmp_path: Path) -> None:
    with Checkpoint(write(tmp_path, "model.safetensors")) as checkpoint:
        make = LinearFactory(checkpoint, parallel=Parallel(), device="cpu", dtype=torch.float32, packed=False)
        order = torch.tensor([5, 4, 3, 2, 1, 0])
        fused = make.by_outputs([MatrixShare("a", 6), MatrixShare("a", 6, order)], 4, bias=False)
        assert torch.equal(fused(torch.eye(4)).T, torch.cat((WEIGHT, WEIGHT.flip(0))))


def test_missing_shard(folder: Path) -> None:
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    with pytest.raises(
        CheckpointError, match=rf"half downloaded: 1 of {len(shards)} files .* {shards[1].name}"
    ):
        load(folder)


@pytest.mark.parametrize("keep", [0, 60])
def test_truncated_shard(folder: Path, keep: int) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="damaged or half downloaded"):
        load(folder)


def test_truncated_bin(tmp_path: Path) -> None:
    path = write(tmp_path, "pytorch_model.bin") / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(CheckpointError, match="damaged or half downloaded"):
        Checkpoint(tmp_path, allow_pickle=True)


def test_pickled_code_is_refused(tmp_path: Path) -> None:
    torch.save({"a.weight": Path("x")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"damaged or half downloaded"):
        Checkpoint(tmp_path, allow_pickle=True)


@pytest.mark.parametrize("layout", ["pytorch_model.bin", "shard.bin"])
def test_pickles_are_not_read_unless_allowed(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, layout)
    monkeypatch.setattr(torch, "load", lambda *_a, **_k: pytest.fail("it was unpickled"))
    with pytest.raises(CheckpointError, match=r"not safetensors.*SSD_ALLOW_PICKLE=1"):
        Checkpoint(folder)


def test_safetensors_index_that_names_a_pickle_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "shard.bin")
    (tmp_path / "pytorch_model.bin.index.json").rename(tmp_path / "model.safetensors.index.json")
    with pytest.raises(CheckpointError, match="SSD_ALLOW_PICKLE=1"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "value",
    [
        {"a.weight": WEIGHT.to_sparse()},
        {"a.weight": torch.empty(1 << 40, device="meta")},
        {1: WEIGHT},
        WEIGHT,
    ],
    ids=["sparse", "meta", "no name", "a tensor"],
)
def test_pickle_of_other_objects_is_refused(tmp_path: Path, value: object) -> None:
    torch.save(value, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"dense tensors|damaged"):
        Checkpoint(tmp_path, allow_pickle=True)


def test_index_and_shard_disagree(tmp_path: Path) -> None:
    write(tmp_path, "one.safetensors")
    index = {"weight_map": {"a.weight": "one.safetensors", "b": "one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="lacks tensors that the index names: b"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"b": "../one"}}))
    with pytest.raises(CheckpointError, match="outside its folder"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weight_map"):
        Checkpoint(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no weights"):
        Checkpoint(tmp_path)


def test_tensors_that_do_not_fit_the_architecture(tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("llama"), tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.layers.0.self_attn.q_norm.weight": torch.ones(16)}, path)
    with pytest.raises(CheckpointError, match=r"does not have: model\.layers\.0\.self_attn\.q_norm\.weight"):
        load(folder)
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, path)
    load(folder)
    lost = {key: value for key, value in tensors.items() if "layers.2" not in key}
    save_file(lost, path)
    with pytest.raises(CheckpointError, match=r"lacks 9 tensors: model\.layers\.2.* and 1 more"):
        load(folder)


def test_bin_checkpoint_gives_the_same_logits(tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("llama"), tmp_path)
    expected = logits(load(folder))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="SSD_ALLOW_PICKLE=1"):
        load(folder)
    assert torch.equal(logits(load(folder, allow_pickle=True)), expected)
