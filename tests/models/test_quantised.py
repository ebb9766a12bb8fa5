"""dtype int8: models near the float ones, sizes, where it is not built, speculation that changes nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ssd_serve.base.errors import UserError
from ssd_serve.base.messages import SamplingParameters, Submit
from ssd_serve.bench.lossless.random_pair import write_random_pair
from ssd_serve.bench.lossless.rig import Case, LoadedPair, run_case
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.kernels.cpu_products import can_multiply_int8
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.native.products import NativeInt8Matrix
from ssd_serve.kernels.native.products import can_multiply_int8 as native_multiplies_int8
from ssd_serve.models import load, sizes
from ssd_serve.models.interface import Model
from ssd_serve.models.weights import linear
from tests.models import checkpoints

TOKENS = [(7 * index * index + 3) % 199 for index in range(40)]


@pytest.fixture(scope="module", params=["llama3-gqa-tied", "llama-linear-biases"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied and untied, with and without biases."""
    return checkpoints.save(checkpoints.make(request.param), tmp_path_factory.mktemp("model"))


def load_model(folder: Path, dtype: str) -> Model:
    return load.load_model(folder, load.ModelOptions(device="cpu:0", dtype=dtype, slots=64, context=64))


def logits(model: Model) -> torch.Tensor:
    empty, places = np.zeros(0, dtype=np.int32), range(len(TOKENS))
    return model.forward(build_batch([RequestRows(TOKENS, places, places, empty, wanted=places)])).logits


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def test_int8_logits_are_near_fp32_with_and_without_products(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = logits(load_model(folder, "fp32"))
    found = logits(load_model(folder, "int8"))
    assert found.dtype == torch.float32
    assert 1e-4 < distance(found, exact) < 0.06
    assert (found.argmax(1) == exact.argmax(1)).sum() >= 34
    monkeypatch.setattr(linear, "can_multiply_int8", lambda: False)
    fallback = load_model(folder, "int8")
    assert distance(logits(fallback), exact) < 0.06
    assert distance(logits(fallback), found) < distance(logits(load_model(folder, "bf16")), exact) * 2
    assert fallback.facts.dtype == "int8"
    # No smaller than bf16, and it says so.
    assert fallback.facts.weight_bytes > load_model(folder, "bf16").facts.weight_bytes


def test_int8_compiled_kernels_give_the_same_logits(
    folder: Path, native: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native_multiplies_int8(native):
        pytest.skip("this machine has no int8 products")
    made: list[NativeInt8Matrix] = []

    def make(*arguments: Any) -> NativeInt8Matrix:
        made.append(NativeInt8Matrix(*arguments))
        return made[-1]

    monkeypatch.setattr(linear, "NativeInt8Matrix", make)
    found = load.load_model(
        folder, load.ModelOptions(device="cpu:0", dtype="int8", slots=64, context=64, native=native)
    )
    exact = logits(load_model(folder, "fp32"))
    assert distance(logits(found), exact) < 0.06
    near = 0.02 if can_multiply_int8() else 0.04  # where oneDNN has no products, sums are rounded to bf16
    assert distance(logits(found), logits(load_model(folder, "int8"))) < near
    assert len(made) >= 4 * found.facts.layers
    assert found.facts.weight_bytes < 0.6 * load_model(folder, "bf16").facts.weight_bytes


def test_int8_facts_and_sizes(folder: Path) -> None:
    bf16, int8 = load_model(folder, "bf16").facts, load_model(folder, "int8").facts
    assert int8.dtype == "int8"
    before = sizes.model_sizes(folder, device="cpu", dtype="int8")
    assert before.resident_bytes == int8.weight_bytes + 199 * 64 * 2  # the embedding stays bf16
    assert before.kv_bytes_per_slot == int8.kv_bytes_per_slot == bf16.kv_bytes_per_slot
    if can_multiply_int8():
        scales = int8.weight_bytes - bf16.weight_bytes // 2
        assert 4 * 199 < scales < 0.1 * bf16.weight_bytes


def test_int8_is_refused_on_gpus(folder: Path) -> None:
    with pytest.raises(UserError, match="int8 is not built for cuda:1"):
        load.load_model(folder, load.ModelOptions(device="cuda:1", dtype="int8", slots=16, context=64))


@pytest.mark.slow
def test_int8_greedy_texts_are_the_same_with_speculation(tmp_path: Path) -> None:
    pair = LoadedPair("random-llama", *write_random_pair("random-llama", tmp_path), dtype="int8")
    assert (pair.target.facts.dtype, pair.draft.facts.dtype) == ("int8", "int8")
    parameters = SamplingParameters(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [tuple((11 * turn + 5 * index) % pair.vocabulary for index in range(12)) for turn in range(6)]
    submits = [Submit(1 + index, prompt, parameters, index) for index, prompt in enumerate(prompts)]
    plain = run_case(pair, Case("ar", 1), submits)
    found = run_case(pair, Case("sd", 4, 8), submits)
    assert found.tokens == plain.tokens
    assert found.accepted > 0
    assert all(len(tokens) == 24 for tokens in found.tokens.values())
