"""Ballast: the same function at a larger cost, for any Llama checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_serve.base.errors import UserError
from ssd_serve.models.hub import embedded_folder
from ssd_serve.recipes.ballast import add_ballast

transformers = pytest.importorskip("transformers")


def checkpoint(folder: Path, **changes: Any) -> Path:
    """A random Llama checkpoint."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def logits(folder: Path) -> torch.Tensor:
    """fp32 logits on fixed tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(model).__name__ == "LlamaForCausalLM"
    tokens = torch.randint(0, 100, (2, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        result: torch.Tensor = model(tokens).logits
    return result


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 6},
        {"num_key_value_heads": 1},
        {"tie_word_embeddings": True},
        {"rms_norm_eps": 0.1},
    ],
)
def test_ballast_keeps_logits(tmp_path: Path, changes: dict[str, Any]) -> None:
    source = checkpoint(tmp_path / "source", **changes)
    sizes = add_ballast(source, tmp_path / "large", hidden=128, layers=5)
    assert sizes.heads * sizes.head >= 128
    assert sizes.intermediate == 352
    assert torch.allclose(logits(tmp_path / "large"), logits(source), atol=1e-4)


def test_ballast_has_no_zero_weights_to_skip(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    add_ballast(source, tmp_path / "large", hidden=128, layers=3, heads=32, intermediate=256)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "large", dtype=torch.float32)
    layer = model.model.layers[2]
    for projection in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.mlp.gate_proj):
        assert (projection.weight != 0).all()
    assert layer.self_attn.q_proj.weight.shape == (32 * 8, 128)
    assert layer.mlp.down_proj.weight.shape == (128, 256)


@pytest.mark.parametrize("sizes", [{"hidden": 32}, {"layers": 1}, {"heads": 7}, {"intermediate": 8}])
def test_sizes_below_the_source_are_refused(tmp_path: Path, sizes: dict[str, int]) -> None:
    source = checkpoint(tmp_path / "source")
    with pytest.raises(UserError):
        add_ballast(source, tmp_path / "large", **({"hidden": 128, "layers": 4} | sizes))


def test_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="supports whole models"):
        add_ballast(embedded_folder("head"), tmp_path / "large", hidden=1024, layers=4)
