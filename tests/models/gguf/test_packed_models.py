"""Models whose weights stay in the blocks of their GGUF file: near the widened ones, and the same in every batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from ssd_serve.base.messages import SamplingParameters, Submit
from ssd_serve.bench.lossless.rig import Case, LoadedPair, run_case
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.kernels.native.layers import NativeLayers
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.native.packed import TYPES, NativePackedLinear, can_multiply_packed
from ssd_serve.models.architectures.dense import decoder
from ssd_serve.models.interface import Model
from ssd_serve.models.load import ModelOptions, load_model
from ssd_serve.models.parallel import Parallel
from ssd_serve.models.sizes import model_sizes
from ssd_serve.models.weights.checkpoint import Checkpoint
from ssd_serve.models.weights.linear import LinearFactory, MatrixShare
from tests.models.checkpoints import make
from tests.models.gguf.files import write_model

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05}
BOUND = 0.06
"""Distance of logits from those of the dequantised model in float32, relative to their size."""


@pytest.fixture(autouse=True)
def library(native: NativeLibrary) -> NativeLibrary:
    if not can_multiply_packed(native):
        pytest.skip("this processor has neither AVX-512 VNNI nor AVX2")
    return native


def load(path: Path, native: NativeLibrary | None, dtype: str = "auto") -> Model:
    return load_model(path, ModelOptions(device="cpu", dtype=dtype, slots=128, context=None, native=native))


def logits(model: Model, tokens: list[int]) -> torch.Tensor:
    places = range(len(tokens))
    return model.forward(
        build_batch([RequestRows(tokens, places, places, np.zeros(0, np.int32), places)])
    ).logits


def tokens_of(count: int) -> list[int]:
    return torch.randint(0, 199, (count,), generator=torch.Generator().manual_seed(3)).tolist()


def check(path: Path, model: Any, rounded: dict[str, torch.Tensor], native: NativeLibrary) -> Model:
    model.load_state_dict({**model.state_dict(), **rounded})
    model.tie_weights()
    tokens = tokens_of(33)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    served = load(path, native)
    assert served.facts.dtype == "packed"
    found = logits(served, tokens)
    assert (found - expected).norm() < BOUND * expected.norm()
    for rows in (1, 4):
        torch.testing.assert_close(logits(served, tokens[:rows]), found[:rows], rtol=0, atol=0)
    return served


@pytest.mark.parametrize("kind", TYPES)
def test_logits_are_near_those_of_the_dequantised_model(
    tmp_path: Path, kind: str, library: NativeLibrary
) -> None:
    model, path = make("llama", **WIDE), tmp_path / "model.gguf"
    served = check(path, model, write_model(path, model, lambda _name: Kind[kind]), library)
    assert served.facts.weight_bytes < path.stat().st_size


def test_bytes_of_the_first_layers_are_their_share(tmp_path: Path, library: NativeLibrary) -> None:
    model, path = make("llama", **WIDE), tmp_path / "model.gguf"
    write_model(path, model, lambda _name: Kind.Q4_1)
    options = ModelOptions(device="cpu", dtype="auto", slots=128, context=None, native=library)
    whole, first = (load_model(path, replace(options, layers=layers)).facts for layers in (None, 1))
    assert 0 < first.weight_bytes < whole.weight_bytes


@pytest.mark.parametrize("case", ["llama3-gqa-tied", "qwen2-biases", "qwen3-qk-norm"])
def test_layers_of_several_types_are_near_too(tmp_path: Path, case: str, library: NativeLibrary) -> None:
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "sliding_window": None}
    model, path = make(case, **plain), tmp_path / "model.gguf"
    mixed = {"v_proj": Kind.Q8_0, "down_proj": Kind.F16, "embed_tokens": Kind.Q5_1}
    check(
        path, model, write_model(path, model, lambda name: mixed.get(name.split(".")[-2], Kind.Q5_0)), library
    )


@pytest.mark.parametrize(
    ("case", "fused"), [("llama", True), ("qwen2-biases", True), ("qwen3-qk-norm", False)]
)
@pytest.mark.parametrize("features", [(), (0, 1)])
def test_layers_in_one_call_give_the_bits_of_separate_calls(
    tmp_path: Path,
    case: str,
    fused: bool,
    features: tuple[int, ...],
    library: NativeLibrary,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    more: dict[str, Any] = {"intermediate_size": 128, "sliding_window": None, "num_hidden_layers": 4}
    more.update(WIDE if case == "llama" else rope)
    model, path = make(case, **more), tmp_path / "model.gguf"
    kinds = {"v_proj": Kind.Q8_0, "down_proj": Kind.Q5_1}
    write_model(path, model, lambda name: kinds.get(name.split(".")[-2], Kind.Q4_1))
    options = ModelOptions(
        device="cpu", dtype="auto", slots=128, context=None, native=library, features=features
    )
    calls: list[range] = []
    run = NativeLayers.run

    def counted(self: NativeLayers, span: range, *rest: Any) -> torch.Tensor:
        calls.append(span)
        return run(self, span, *rest)

    monkeypatch.setattr(NativeLayers, "run", counted)
    together = load_model(path, options)
    monkeypatch.setattr(decoder, "fused_layers", lambda *_: None)
    apart = load_model(path, options)
    places = range(33)
    prompt = RequestRows(tokens_of(33), places, places, np.zeros(0, np.int32), [32])
    tree = RequestRows(
        tokens_of(4), [33, 34, 34, 35], [40, 41, 60, 43], np.arange(33, dtype=np.int32), [0, 3], [1, 3, 5, 11]
    )
    threads = torch.get_num_threads()
    for rows, number in ((prompt, 1), (tree, 1), (tree, 2)):
        torch.set_num_threads(number)
        found, expected = together.forward(build_batch([rows])), apart.forward(build_batch([rows]))
        torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=0)
        torch.testing.assert_close(found.features, expected.features, rtol=0, atol=0)
    torch.set_num_threads(threads)
    assert calls == (3 * [range(3)] if fused else [])


def test_named_dtypes_and_machines_without_products_widen(tmp_path: Path, library: NativeLibrary) -> None:
    model, path = make("llama", **WIDE), tmp_path / "model.gguf"
    write_model(path, model, lambda _name: Kind.Q4_1)
    packed, wide, alone = load(path, library), load(path, library, "bf16"), load(path, None)
    assert [each.facts.dtype for each in (packed, wide)] == ["packed", "bf16"]
    assert alone.facts.dtype in ("bf16", "fp32")
    assert packed.facts.weight_bytes < 0.4 * wide.facts.weight_bytes
    sizes = model_sizes(path, device="cpu", dtype="auto", native=library)
    assert packed.facts.weight_bytes == sizes.read_bytes
    assert sizes.resident_bytes < 1.1 * path.stat().st_size


@pytest.mark.parametrize(("kind", "kept"), [(Kind.Q4_1, True), (Kind.Q4_K, False)])
def test_share_of_a_rank_that_ends_within_a_block_is_widened(
    tmp_path: Path, kind: Kind, kept: bool, library: NativeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    model, path = make("llama", **{**WIDE, "intermediate_size": 256}), tmp_path / "model.gguf"
    rounded = write_model(path, model, lambda _name: kind)
    name, rows = "model.layers.0.mlp.down_proj", torch.randn((3, 256)).bfloat16()
    parts: list[torch.Tensor] = []
    for rank in range(2):
        with Checkpoint(path) as checkpoint, caplog.at_level("INFO"):
            factory = LinearFactory(
                checkpoint,
                parallel=Parallel(rank, 2),
                device="cpu",
                dtype=torch.bfloat16,
                native=library,
                keep=True,
            )
            linear = factory.by_inputs(MatrixShare(name, 256), 256, bias=False)
            assert isinstance(linear, NativePackedLinear) is kept
            parts.append(linear(rows[:, 128 * rank : 128 * (rank + 1)]).float())
    expected = rows.float() @ rounded[f"{name}.weight"].T
    assert (sum(parts) - expected).norm() < BOUND * expected.norm()
    assert ("ends within a block" in caplog.text) is not kept


def test_speculation_does_not_change_texts(tmp_path: Path, library: NativeLibrary) -> None:
    model, path = make("llama", **WIDE), tmp_path / "model.gguf"
    write_model(path, model, lambda _name: Kind.Q4_1)
    pair = LoadedPair("packed", path, path, dtype="auto", native=library)
    assert (pair.target.facts.dtype, pair.draft.facts.dtype) == ("packed", "packed")
    parameters = SamplingParameters(temperature=0.7, max_tokens=24, ignore_eos=True)
    submits = [Submit(1 + turn, tuple(tokens_of(8 + turn)), parameters, turn) for turn in range(4)]
    plain = run_case(pair, Case("ar", 1), submits)
    found = run_case(pair, Case("sd", 4, 8), submits)
    assert found.tokens == plain.tokens
    assert found.accepted > 24
