"""Tests of fp8 checkpoints with scales for an fp8 KV cache: these scales are ignored."""

from pathlib import Path

import pytest
import torch

from ssd_serve.base.errors import CheckpointError
from tests.models import checkpoints
from tests.models.fp8_checkpoints import FORMS, change_config, change_tensors, with_fp8_cache, write
from tests.models.test_fp8_checkpoints import TOKENS, distance, load_model, logits

ATTENTION = "model.layers.1.self_attn"
SCALES = {
    "fp8-static": ["kv_scale"],
    "compressed-channel-dynamic": ["k_scale", "v_scale"],
    "quark-tensor-static": ["k_proj.output_scale", "v_proj.output_scale"],
    "quark-mixed-layers": ["k_proj.output_scale", "v_proj.output_scale"],
}


def add(folder: Path, *names: str) -> None:
    """Add scales that would change the logits if they were used."""
    change_tensors(folder, lambda tensors: tensors.update({name: torch.full((1,), 1e3) for name in names}))


@pytest.mark.parametrize("name", SCALES)
def test_logits_are_those_of_wide_keys_and_values(name: str, tmp_path: Path) -> None:
    reference = checkpoints.logits(write(FORMS[name], tmp_path), TOKENS)
    plain = logits(load_model(tmp_path))
    change_config(tmp_path, quantization_config=with_fp8_cache(FORMS[name].config))
    add(tmp_path, *(f"{ATTENTION}.{scale}" for scale in SCALES[name]))
    found = logits(load_model(tmp_path))
    assert torch.equal(found, plain)
    assert distance(found, reference) < 1e-5


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.up_proj.output_scale",
        f"{ATTENTION}.q_proj.output_scale",
        f"{ATTENTION}.o_proj.k_scale",
        f"{ATTENTION}.k_scales",
        "k_scale",
    ],
)
def test_other_scales_are_unexpected_tensors(name: str, tmp_path: Path) -> None:
    form = FORMS["quark-tensor-static"]
    write(form, tmp_path)
    change_config(tmp_path, quantization_config=with_fp8_cache(form.config))
    add(tmp_path, name)
    with pytest.raises(CheckpointError, match=f"holds 1 tensors that its architecture does not have: {name}"):
        load_model(tmp_path)


def test_a_model_that_is_not_quantised_has_no_scales(tmp_path: Path) -> None:
    checkpoints.save(checkpoints.make("llama-linear-biases"), tmp_path)
    load_model(tmp_path)
    add(tmp_path, f"{ATTENTION}.k_scale")
    with pytest.raises(CheckpointError, match=r"self_attn\.k_scale"):
        load_model(tmp_path)
