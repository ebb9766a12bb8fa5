"""A blurred copy: the same model with noise of the size that was asked for, the same for the same seed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssd_serve.base.errors import UserError
from ssd_serve.recipes.blur import blur


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    save_file({"a": torch.randn(64, 64), "norm": torch.ones(64)}, folder / "model.safetensors")
    return folder


def copy_of(source: Path, noise: float, name: str) -> dict[str, torch.Tensor]:
    blur(source, source.parent / name, noise)
    assert (source.parent / name / "tokenizer.json").is_file()
    return load_file(source.parent / name / "model.safetensors")


def test_noise_is_relative_seeded_and_spares_norms(source: Path) -> None:
    before = load_file(source / "model.safetensors")
    after = copy_of(source, 0.5, "after")
    again = copy_of(source, 0.5, "again")
    difference = (after["a"] - before["a"]).std() / before["a"].std()
    assert 0.45 < float(difference) < 0.55
    assert torch.equal(after["a"], again["a"])
    assert torch.equal(after["norm"], before["norm"])


def test_no_noise_is_a_copy(source: Path) -> None:
    before = load_file(source / "model.safetensors")
    assert torch.equal(copy_of(source, 0.0, "same")["a"], before["a"])


def test_negative_noise_is_refused(source: Path) -> None:
    with pytest.raises(UserError, match="negative"):
        blur(source, source.parent / "x", -0.1)
