"""A model of its first layers alone: what transformers computes with the same number of them."""

from pathlib import Path

import pytest

from ssd_serve.kernels.batch import build_batch
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.load import ModelOptions, load_model
from ssd_serve.models.parallel import Parallel
from tests.models import checkpoints
from tests.models.test_decoder import SLOTS, chunk, close, numbers


@pytest.mark.parametrize("case", ["llama3-gqa-tied", "qwen2-mixed-windows", "qwen3-qk-norm"])
@pytest.mark.parametrize("layers", [1, 2])
def test_it_computes_what_a_model_of_so_many_layers_does(case: str, layers: int, tmp_path: Path) -> None:
    theirs = checkpoints.make(case)
    folder = checkpoints.save(theirs, tmp_path)
    options = ModelOptions(device="cpu", dtype="fp32", slots=SLOTS, context=None, layers=layers)
    ours = load_model(folder, options)
    assert ours.facts.layers == layers < len(load_description(folder).sizes(Parallel()).kv)
    del theirs.model.layers[layers:]
    theirs.config.num_hidden_layers = layers
    tokens = numbers(40, 3)
    found = ours.forward(build_batch([chunk(tokens, 0, 40, range(40))])).logits
    close(found, checkpoints.logits(theirs, tokens))
