"""Tests of batch invariance: bitwise equal logits of a row alone, in a batch, in a tree and in any chunk."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_serve.base.errors import UserError
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.kernels.fixed_rows import threads
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.native.products import has_bf16_products
from ssd_serve.models.interface import Model
from ssd_serve.models.load import ModelOptions, load_model
from ssd_serve.models.weights.linear import DenseLinear, Linear
from ssd_serve.verifier.control.timing import identity
from tests.examples import examples
from tests.models import checkpoints

SLOTS, LENGTH = 400, 40
CASES = (
    pytest.param(("llama-linear-biases", "bf16", "torch"), marks=pytest.mark.slow),
    pytest.param(("qwen3-qk-norm", "fp16", "torch"), marks=pytest.mark.slow),
    pytest.param(("llama3-gqa-tied", "fp32", "torch"), marks=pytest.mark.slow),
    pytest.param(("qwen2-mixed-windows", "int8", "torch"), marks=pytest.mark.slow),
    pytest.param(("qwen2-mixed-windows", "bf16", "compiled"), marks=pytest.mark.slow),
    ("qwen3-qk-norm", "fp32", "compiled"),
)


def load(folder: Path, dtype: str, native: NativeLibrary | None, batch_invariant: bool) -> Model:
    return load_model(
        folder,
        ModelOptions(
            device="cpu",
            dtype=dtype,
            slots=SLOTS,
            context=None,
            native=native,
            batch_invariant=batch_invariant,
        ),
    )


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    case, dtype, kernels = request.param
    folder = checkpoints.save(checkpoints.make(case), tmp_path_factory.mktemp("model"))
    return load(folder, dtype, request.getfixturevalue("native") if kernels == "compiled" else None, True)


def rows(tokens: list[int], start: int, stop: int, slots: list[int]) -> RequestRows:
    """Return rows start..stop of a text, with all earlier ones committed."""
    return RequestRows(
        tokens[start:stop],
        range(start, stop),
        slots[start:stop],
        np.asarray(slots[:start], dtype=np.int32),
        range(stop - start),
    )


def one_by_one(model: Model, tokens: list[int]) -> torch.Tensor:
    """Return logits of every position, with one forward per token: [tokens, vocabulary]."""
    slots = list(range(LENGTH))
    parts = [build_batch([rows(tokens, index, index + 1, slots)]) for index in range(len(tokens))]
    return torch.cat([model.forward(part).logits for part in parts])


def in_chunks(rng: random.Random, model: Model, tokens: list[int], slots: list[int], to: int) -> torch.Tensor:
    """Return logits of the first `to` positions in random chunks, batched with other rows: [to, vocabulary]."""
    found: list[torch.Tensor] = []
    start = 0
    while start < to:
        stop = min(to, start + rng.choice([1, 2, 7, 16, 17, 40]))
        stranger = rows(rng.choices(range(199), k=30), 0, rng.randrange(1, 30), slots[-30:])
        mine = rows(tokens, start, stop, slots)
        first = rng.random() < 0.5
        logits = model.forward(build_batch([mine, stranger] if first else [stranger, mine])).logits
        found.append(logits[: stop - start] if first else logits[start - stop :])
        start = stop
    return torch.cat(found)


def in_a_tree(
    rng: random.Random, tokens: list[int], start: int, slots: list[int]
) -> tuple[RequestRows, list[int]]:
    """Return a random tree below `start` committed tokens that contains the text, and the text's rows."""
    paths, texts, mine = [[0]], [tokens[start]], [0]
    while len(mine) < min(5, len(tokens) - start):
        for _ in range(rng.randrange(4)):
            parent = rng.randrange(len(paths))
            paths.append([*paths[parent], len(paths)])
            texts.append(rng.randrange(199))
        paths.append([*paths[mine[-1]], len(paths)])
        texts.append(tokens[start + len(mine)])
        mine.append(len(paths) - 1)
    own = rng.sample(slots[LENGTH:-30], len(paths))
    part = RequestRows(
        texts,
        [start + len(path) - 1 for path in paths],
        own,
        np.asarray(slots[:start], dtype=np.int32),
        range(len(paths)),
        [sum(1 << node for node in path) for path in paths],
    )
    return part, mine


@settings(max_examples=examples(12))
@given(seed=st.integers(0, 2**32))
def test_batch_invariant_logits_are_bitwise_equal(model: Model, seed: int) -> None:
    rng = random.Random(seed)
    tokens = rng.choices(range(199), k=LENGTH)
    plain = one_by_one(model, tokens)
    slots = rng.sample(range(SLOTS), SLOTS) if rng.random() < 0.7 else list(range(SLOTS))
    committed = rng.randrange(1, LENGTH)
    with threads(rng.choice([1, 2])):
        assert torch.equal(in_chunks(rng, model, tokens, slots, committed), plain[:committed])
        tree, mine = in_a_tree(rng, tokens, committed, slots)
        strangers = [rows(rng.choices(range(199), k=30), 0, rng.randrange(1, 30), slots[-30:])]
        logits = model.forward(build_batch([tree, *strangers])).logits
    assert torch.equal(logits[mine], plain[committed : committed + len(mine)])


def test_logits_differ_without_batch_invariance(tmp_path: Path) -> None:
    """Chunks change at least one logit without batch invariance."""
    folder = checkpoints.save(checkpoints.make("llama3-gqa-tied"), tmp_path)
    model, rng = load(folder, "fp32", None, False), random.Random(1)
    tokens = rng.choices(range(199), k=LENGTH)
    assert not torch.equal(
        in_chunks(rng, model, tokens, list(range(SLOTS)), LENGTH), one_by_one(model, tokens)
    )


def test_batch_invariance_is_in_facts_and_cost_identity(tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("llama"), tmp_path)
    plain, fixed = (load(folder, "bf16", None, each) for each in (False, True))
    assert (plain.facts.batch_invariant, fixed.facts.batch_invariant) == (False, True)
    assert identity(plain, "cpu") != identity(fixed, "cpu")


def test_product_that_depends_on_the_batch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Placed(DenseLinear):
        """Product that adds the row number, so that it depends on the batch."""

        def __call__(self, rows: torch.Tensor) -> torch.Tensor:
            return super().__call__(rows) + torch.arange(len(rows))[:, None]

    def kind(*_: Any) -> Any:
        def make(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
            return Placed(weight, bias)

        return make

    monkeypatch.setattr("ssd_serve.models.weights.linear.matrix_kind", kind)
    folder = checkpoints.save(checkpoints.make("llama"), tmp_path)
    with pytest.raises(UserError, match=r"the product with the matrix 'lm_head' by Placed"):
        load(folder, "bf16", None, True)


def test_compiled_kernels_are_not_tried(
    native: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_bf16_products(native):
        pytest.skip("this processor has neither AVX-512 BF16 nor AVX2: its bf16 products are torch's")

    def refuse(*_: Any) -> Any:
        raise AssertionError("a compiled kernel was put into blocks")

    monkeypatch.setattr("ssd_serve.models.invariant.settle", refuse)
    folder = checkpoints.save(checkpoints.make("llama"), tmp_path)
    assert load(folder, "bf16", native, True).facts.batch_invariant
