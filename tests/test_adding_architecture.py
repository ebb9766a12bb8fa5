"""Following docs/adding.md gives an architecture that computes what its authors' code computes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ssd_serve.app.plan.known_models import Computing, planned_model
from ssd_serve.base.errors import CheckpointError
from ssd_serve.bench.lossless.judge import Float64Decoder
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.models.load import ModelOptions, load_model
from ssd_serve.models.sizes import model_sizes
from tests.adding_page import follow
from tests.models import checkpoints

TOKENS = [(7 * place + 3) % 199 for place in range(20)]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow("An architecture", tmp_path, monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A random Gemma."""
    options: Any = {**checkpoints.SMALL, "head_dim": 32, "attn_implementation": "eager"}
    config = transformers.GemmaConfig(**options)
    torch.manual_seed(3)
    model = transformers.GemmaForCausalLM(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(-0.5, 0.5)
    checkpoints.save(model, tmp_path / "model")
    torch.save(checkpoints.logits(model, TOKENS), tmp_path / "model" / "reference")
    return tmp_path / "model"


@pytest.mark.usefixtures("page")
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_its_logits_are_those_of_transformers(folder: Path, batch_invariant: bool) -> None:
    options = ModelOptions(
        device="cpu", dtype="fp32", slots=32, context=None, batch_invariant=batch_invariant
    )
    rows = RequestRows(TOKENS, range(20), range(20), np.zeros(0, dtype=np.int32), range(20))
    found = load_model(folder, options).forward(build_batch([rows])).logits
    torch.testing.assert_close(found, torch.load(folder / "reference"), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("page")
def test_what_it_holds_is_known_before_it_is_loaded(folder: Path) -> None:
    loaded = load_model(folder, ModelOptions(device="cpu", dtype="fp32", slots=32, context=None)).facts
    for device in ("cpu", "cuda:0"):
        sizes = model_sizes(folder, device=device, dtype="fp32")
        planned = planned_model(str(folder), "target", Computing(device, torch.float32, asked="fp32"), None)
        assert sizes.read_bytes == planned.matrix_bytes == loaded.weight_bytes
        assert sizes.resident_bytes == planned.resident_bytes == loaded.weight_bytes + 4 * 199 * 64


@pytest.mark.usefixtures("page")
def test_the_float64_decoder_of_others_does_not_judge_it(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="of the architecture of Gemma, for which there is no float64"):
        Float64Decoder(folder)


def test_without_the_line_it_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="GemmaForCausalLM is not supported"):
        model_sizes(folder, device="cpu", dtype="fp32")
