"""EAGLE-3 heads against transformers' blocks: prompts, steps and trees, in every published layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ssd_serve.errors import CheckpointError
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.models.config import is_eagle3
from ssd_serve.models.heads.config import EagleConfig
from ssd_serve.models.heads.eagle import OWN, EagleHead
from ssd_serve.models.heads.load import head_sizes, load_head
from ssd_serve.models.load import ModelWish
from tests.models import checkpoints
from tests.models.heads import FLAT, HIDDEN, LAYERS, NESTED, VOCABULARY, Oracle
from tests.models.test_decoder import chunk

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "safeailab": (FLAT, {}),
    "whole-vocabulary": (FLAT, {"proposed": VOCABULARY}),
    "targets-embedding": (FLAT, {"own_embedding": False}),
    "speculators": (NESTED, {"residual_is_normed": True, "norms": "one"}),
    "eagle-3.1": (NESTED, {"norms": "each", "feed_normed": True}),
    "qwen3": (NESTED, {"family": "qwen3"}),
}


def target(folder: Path) -> Path:
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS}
    return checkpoints.save(checkpoints.make("llama", **sizes), folder)


def loaded(folder: Path, theirs: Path, **changes: Any) -> EagleHead:
    sizes = head_sizes(folder, theirs, device="cpu", dtype="fp32", **changes)
    return load_head(folder, ModelWish(device="cpu", dtype="fp32", slots=128, context=None), sizes)


@pytest.fixture(scope="module", params=CASES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Oracle, EagleHead]:
    layout, options = CASES[request.param]
    oracle, folder = Oracle(**options), tmp_path_factory.mktemp("head")
    theirs = target(folder / "target")
    head = loaded(oracle.save(folder / "head", layout), theirs)
    if not oracle.own_embedding:
        oracle.embed.weight.data = load_embedding(theirs)
    return oracle, head


def load_embedding(folder: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


def random_rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, VOCABULARY, (count,), generator=source),
        torch.randn((count, HIDDEN), generator=source),
    )


def same(oracle: Oracle, logits: torch.Tensor, expected: torch.Tensor) -> None:
    """On what the head proposes; the rest is never proposed."""
    proposed = oracle.ids if oracle.proposed < VOCABULARY else torch.arange(VOCABULARY)
    torch.testing.assert_close(logits[:, proposed], expected, atol=1e-4, rtol=0)
    others = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, proposed, False)
    assert bool((logits[:, others] == -torch.inf).all())


def test_features_are_fused(pair: tuple[Oracle, EagleHead]) -> None:
    oracle, head = pair
    features = torch.randn((5, 3 * HIDDEN), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(head.fuse(features), oracle.fuse(features), atol=1e-5, rtol=0)


def test_a_prompt_and_steps_from_its_own_vectors(pair: tuple[Oracle, EagleHead]) -> None:
    """First with the features of a target, then with what the head has said itself."""
    oracle, head = pair
    tokens, vectors = random_rows(20, 2)
    part = chunk(tokens.tolist(), 0, 12, range(20))
    found = head.forward(replace(build_batch([part]), vectors=vectors[:12]))
    expected, own = oracle(tokens[:12], vectors[:12])
    same(oracle, found.logits, expected)
    torch.testing.assert_close(found.features[OWN], own, atol=1e-4, rtol=0)
    for end in range(12, 15):
        vectors[end] = found.features[OWN][-1]
        part = chunk(tokens.tolist(), end, end + 1, range(20))
        found = head.forward(replace(build_batch([part]), vectors=vectors[end : end + 1]))
        expected, own = oracle(tokens[: end + 1], vectors[: end + 1])
        same(oracle, found.logits, expected[-1:])
        torch.testing.assert_close(found.features[OWN], own[-1:], atol=1e-4, rtol=0)


def test_branches_of_a_tree_see_their_own_path_only(pair: tuple[Oracle, EagleHead]) -> None:
    oracle, head = pair
    tokens, vectors = random_rows(9, 3)
    head.forward(replace(build_batch([chunk(tokens.tolist(), 0, 6, range(9))]), vectors=vectors[:6]))
    # The root is the sixth token; two of its children, and a child of the second.
    rows = RequestRows(
        tokens=tokens[6:].tolist(),
        positions=[6, 6, 7],
        write_slots=[6, 7, 8],
        prefix_slots=np.arange(6, dtype=np.int32),
        wanted=[0, 2],
        ancestry=[0b001, 0b010, 0b110],
    )
    found = head.forward(replace(build_batch([rows]), vectors=vectors[6:]))
    for place, path in enumerate(([6], [7, 8])):
        chosen = [*range(6), *path]
        expected, own = oracle(tokens[chosen], vectors[chosen])
        same(oracle, found.logits[place : place + 1], expected[-1:])
        torch.testing.assert_close(found.features[OWN][place], own[-1], atol=1e-4, rtol=0)


def test_the_layers_it_reads(tmp_path: Path) -> None:
    """Inputs of layers in one layout, outputs in the other; by a rule where none are named, or as told."""
    theirs = target(tmp_path / "target")

    def features(layout: str, name: str, **changes: Any) -> tuple[int, ...] | None:
        folder = tmp_path / name
        if not folder.exists():
            Oracle().save(folder, layout)
        sizes = head_sizes(folder, theirs, device="cpu", dtype="fp32", **changes)
        config = sizes.description.config
        assert isinstance(config, EagleConfig)
        return config.features

    assert features(NESTED, "nested") == (1, 3, 4)
    assert features(FLAT, "flat") == (1, LAYERS // 2 - 1, LAYERS - 4)
    assert features(FLAT, "flat", features=(0, 2, 7)) == (0, 2, 7)
    with pytest.raises(CheckpointError, match=r"reads outputs of layers \[0, 2, 8\], the target has 8"):
        features(FLAT, "flat", features=(0, 2, 8))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    head = Oracle().save(tmp_path / "head", FLAT)
    wide = checkpoints.save(checkpoints.make("llama", num_hidden_layers=LAYERS), tmp_path / "wide")
    with pytest.raises(
        CheckpointError, match=f"a head for targets of width {HIDDEN} with {VOCABULARY} tokens"
    ):
        head_sizes(head, wide, device="cpu", dtype="fp32")
    assert is_eagle3({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000})
    assert not is_eagle3({"architectures": ["LlamaForCausalLM"]})
