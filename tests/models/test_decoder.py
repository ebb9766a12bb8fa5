"""The decoder against transformers: prefill, chunks, decode and trees, in fp32, for every architecture."""

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ssd_serve.base.draft_messages import FINAL
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.interface import Model
from ssd_serve.models.load import ModelOptions, load_model
from ssd_serve.models.parallel import Parallel
from ssd_serve.models.weights import linear
from tests.models import checkpoints

TOLERANCE = 1e-4
SLOTS = 256
NATIVE_CASES = ("llama-linear-biases", "mistral-window", "qwen3-qk-norm")
QUICK_CASES = [
    ("llama3-gqa-tied", "torch"),
    ("mistral-window", "torch"),
    ("qwen2-mixed-windows", "torch"),
    ("qwen3-qk-norm", "torch"),
    ("llama-linear-biases", "native"),
]
ALL_CASES = [*((case, "torch") for case in checkpoints.CASES), *((case, "native") for case in NATIVE_CASES)]
CASES = [pytest.param(each, marks=() if each in QUICK_CASES else pytest.mark.slow) for each in ALL_CASES]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Model]:
    """transformers' model and ours, from the same files; ours with torch's kernels and with compiled ones."""
    case, kernels = request.param
    theirs = checkpoints.make(case)
    folder = checkpoints.save(theirs, tmp_path_factory.mktemp("model"))
    compiled = request.getfixturevalue("native") if kernels == "native" else None
    return theirs, load_model(
        folder, ModelOptions(device="cpu", dtype="fp32", slots=SLOTS, context=None, native=compiled)
    )


def chunk(tokens: Sequence[int], start: int, stop: int, slots: Sequence[int]) -> RequestRows:
    """Rows start..stop of a sequence, those before being committed; all logits wanted."""
    return RequestRows(
        tokens=tokens[start:stop],
        positions=range(start, stop),
        write_slots=slots[start:stop],
        prefix_slots=np.asarray(slots[:start], dtype=np.int32),
        wanted=range(stop - start),
    )


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs.clone(), atol=TOLERANCE, rtol=0)


def numbers(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(199), k=count)


@pytest.mark.parametrize("borders", [[0, 40], [0, 7, 24, 30, *range(31, 41)]])
@pytest.mark.parametrize("scattered", [False, True])
def test_prefill_in_chunks_then_decode(pair: tuple[Any, Model], scattered: bool, borders: list[int]) -> None:
    theirs, ours = pair
    tokens = numbers(40, 2)
    slots = random.Random(3).sample(range(SLOTS), 40) if scattered else list(range(100, 140))
    pieces = [
        ours.forward(build_batch([chunk(tokens, start, stop, slots)])).logits
        for start, stop in pairwise(borders)
    ]
    close(torch.cat(pieces), checkpoints.logits(theirs, tokens))


def test_tree_rows_see_their_own_path_only(pair: tuple[Any, Model]) -> None:
    theirs, ours = pair
    prompt = numbers(20, 4)
    slots = list(range(60, 80))
    ours.forward(build_batch([chunk(prompt[:-1], 0, 19, slots)]))
    parents = [-1, 0, 0, 1, 1, 2, 3, 6]  # row 0 is the root
    tokens = [prompt[-1], *numbers(7, 5)]
    paths = [[0]]
    for row, parent in enumerate(parents[1:], start=1):
        paths.append([*paths[parent], row])
    rows = RequestRows(
        tokens=tokens,
        positions=[18 + len(path) for path in paths],
        write_slots=[90, 3, 81, 82, 84, 99, 98, 97],
        prefix_slots=np.asarray(slots[:19], dtype=np.int32),
        wanted=range(8),
        ancestry=[sum(1 << index for index in path) for path in paths],
    )
    result = ours.forward(build_batch([rows])).logits
    for row, path in enumerate(paths):
        expected = checkpoints.logits(theirs, prompt[:-1] + [tokens[index] for index in path])
        close(result[row], expected[-1])


def test_requests_share_a_batch(pair: tuple[Any, Model]) -> None:
    theirs, ours = pair
    first, second = numbers(30, 6), numbers(12, 7)
    ours.forward(build_batch([chunk(first, 0, 29, range(0, 30))]))
    parts = [chunk(first, 29, 30, range(0, 30)), chunk(second, 0, 12, range(40, 52))]
    result = ours.forward(build_batch(parts)).logits
    close(result[0], checkpoints.logits(theirs, first)[-1])
    close(result[1:], checkpoints.logits(theirs, second))


@pytest.mark.parametrize("wanted", [[], [3], [0, 11]])
def test_rows_without_logits_are_in_the_kv_cache(pair: tuple[Any, Model], wanted: list[int]) -> None:
    theirs, ours = pair
    tokens, slots = numbers(13, 9), range(20, 33)
    read = RequestRows(tokens[:12], range(12), slots[:12], np.zeros(0, dtype=np.int32), wanted=wanted)
    expected = checkpoints.logits(theirs, tokens)
    found = ours.forward(build_batch([read])).logits
    assert found.shape == (len(wanted), 199)
    close(found, expected[wanted])
    close(ours.forward(build_batch([chunk(tokens, 12, 13, slots)])).logits, expected[12:])


def test_facts(pair: tuple[Any, Model]) -> None:
    theirs, ours = pair
    facts = ours.facts
    matrices = [p for name, p in theirs.named_parameters() if p.ndim == 2 and "embed" not in name]
    head = theirs.lm_head.weight
    tied = head is theirs.model.embed_tokens.weight
    assert facts.weight_bytes == 4 * (sum(p.numel() for p in matrices) + (head.numel() if tied else 0))
    assert (facts.vocabulary, facts.layers, facts.hidden, facts.context) == (199, 3, 64, 128)
    assert facts.eos_token_ids == (2,)
    assert facts.kv_bytes_per_slot == 3 * 2 * theirs.config.num_key_value_heads * 4 * (
        getattr(theirs.config, "head_dim", None) or 16
    )


def test_shards_and_dense_matrices_give_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "can_pack", lambda _dtype: False)
    theirs = checkpoints.make("llama")
    folder = checkpoints.save(theirs, tmp_path, max_shard_size="60KB")
    ours = load_model(folder, ModelOptions(device="cpu", dtype="fp32", slots=32, context=32))
    tokens = numbers(20, 9)
    batch = build_batch([chunk(tokens, 0, 20, range(20))])
    close(ours.forward(batch).logits, checkpoints.logits(theirs, tokens))
    assert ours.facts.context == 32


def test_hidden_states_on_request(tmp_path: Path) -> None:
    theirs = checkpoints.make("llama")
    folder = checkpoints.save(theirs, tmp_path)
    options = ModelOptions(device="cpu", dtype="fp32", slots=32, context=None, features=(0, 2, FINAL))
    ours = load_model(folder, options)
    tokens = numbers(10, 10)
    with torch.inference_mode():
        outputs = theirs.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        expected = theirs.lm_head(outputs.last_hidden_state)[0]
        before = theirs.model.layers[2](
            outputs.hidden_states[2],
            position_embeddings=theirs.model.rotary_emb(outputs.hidden_states[2], torch.arange(10)[None]),
            attention_mask=torch.full((10, 10), -torch.inf).triu(1)[None, None],
        )
    for wanted in (range(10), [3, 9], []):
        part = chunk(tokens, 0, 10, range(10))._replace(wanted=wanted)
        result = ours.forward(build_batch([part]))
        assert set(result.features) == {"layer.0", "layer.2", "final"}
        close(result.features["layer.0"], outputs.hidden_states[1][0])
        close(result.features["layer.2"], before[0])
        close(result.features["final"], outputs.last_hidden_state[0])
        close(result.logits, expected[[*wanted]])


@pytest.mark.parametrize(("dtype", "kernels"), [("bf16", "torch"), ("bf16", "native"), ("fp16", "torch")])
def test_half_precision_is_near(
    tmp_path: Path, dtype: str, kernels: str, request: pytest.FixtureRequest
) -> None:
    theirs = checkpoints.make("qwen3-qk-norm", initializer_range=0.05)
    folder = checkpoints.save(theirs, tmp_path)
    compiled = request.getfixturevalue("native") if kernels == "native" else None
    ours = load_model(
        folder, ModelOptions(device="cpu", dtype=dtype, slots=32, context=None, native=compiled)
    )
    tokens = numbers(20, 11)
    result = ours.forward(build_batch([chunk(tokens, 0, 20, range(20))])).logits
    expected = checkpoints.logits(theirs, tokens)
    assert result.dtype == torch.float32
    assert (result - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize(("case", "layers"), [("qwen2-mixed-windows", 1), ("qwen3-qk-norm", 2)])
def test_first_layers_equal_a_model_of_that_many_layers(case: str, layers: int, tmp_path: Path) -> None:
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
