"""A P-EAGLE head as a draft source, against transformers' blocks that read text and masks from the beginning."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ssd_serve.base.errors import CheckpointError
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.drafter.sources.contract import Block, NodeRequest
from ssd_serve.drafter.sources.peagle.source import PEagleSource
from ssd_serve.drafter.sources.whole_model import DraftModel
from ssd_serve.models.heads.load import head_config
from tests.drafter.test_lm_heads import loaded as load_source
from tests.drafter.test_lm_heads import target as tiny_target
from tests.end_to_end.tiny_pair import write_peagle
from tests.models.heads import FLAT, HIDDEN, NESTED, VOCABULARY, Oracle
from tests.models.test_heads import loaded, target

__all__ = ["tiny_target"]

GREEDY = SamplingParameters(temperature=0.0)
MASK, POSITIONS, FAN_OUT = 90, 4, 3
TEXTS = {1: [5, 9, 60, 33, 2, 71, 8, 13], 2: [7, 7, 8]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": (FLAT, {"layers": 4}),
    "speculators": (NESTED, {"layers": 2, "residual_is_normed": True, "norms": "each"}),
    "one-layer-qwen3": (NESTED, {"family": "qwen3", "own_embedding": False}),
}


class Drafted:
    """A source, its oracle, and two requests with features of all positions."""

    def __init__(self, case: str, folder: Path) -> None:
        layout, more = CASES[case]
        self.oracle = Oracle(mask=MASK, **more)
        self.target = target(folder / "target")
        self.folder = self.oracle.save(folder / "head", layout)
        self.oracle.adopt(load_file(self.target / "model.safetensors"))
        head = loaded(self.folder, self.target)
        self.source = PEagleSource(DraftModel(head, 128).arguments(FAN_OUT), head, POSITIONS)
        self.texts = {each: list(text) for each, text in TEXTS.items()}
        self.trees = {each: SpeculationTree(each, 100) for each in TEXTS}
        self.features = {
            each: torch.randn(20, 3 * HIDDEN, generator=torch.Generator().manual_seed(each)) for each in TEXTS
        }
        for each, text in self.texts.items():
            self.source.open(each, text, GREEDY, 0)

    def read(self, request: int, first: int, end: int) -> None:
        self.source.read(request, first, self.features[request][first:end])

    def commit(self, request: int, tokens: list[int]) -> None:
        before = len(self.texts[request])
        self.read(request, before - 1, before - 1 + len(tokens))
        self.texts[request] += tokens
        self.source.commit(request, tokens, [], [])

    def expand(self, *requests: int) -> list[Block | None]:
        roots = [NodeRequest(each, self.trees[each].root) for each in requests]
        return list(self.source.expand(roots, [(1.0,)] * len(roots)))

    def check(self, request: int, block: Block | None, first: int = 0) -> None:
        """The block after a text; features before the place `first` are lost."""
        assert block is not None
        text = self.texts[request]
        tokens = torch.tensor([*text[first + 1 :], *[MASK] * (POSITIONS - 1)])
        known = self.features[request][first : len(text) - 1]
        masked = self.oracle.mask_hidden.expand(POSITIONS - 1, -1)
        logits, _ = self.oracle(tokens, self.oracle.fuse(torch.cat((known, masked))))
        wanted = logits[-POSITIONS:].log_softmax(-1).topk(FAN_OUT)
        ids = self.oracle.ids[wanted.indices] if self.oracle.proposed < VOCABULARY else wanted.indices
        assert block.tokens.tolist() == ids.tolist()
        np.testing.assert_allclose(block.log_probabilities, wanted.values.numpy(), atol=1e-4)


@pytest.fixture(params=CASES)
def drafted(request: pytest.FixtureRequest, tmp_path: Path) -> Drafted:
    return Drafted(request.param, tmp_path)


def test_blocks_of_two_requests_in_one_forward_and_after_commits(drafted: Drafted) -> None:
    assert drafted.expand(1) == [None], "no features yet"
    for request, text in TEXTS.items():
        drafted.read(request, 0, len(text) - 1)
    for request, block in zip((2, 1), drafted.expand(2, 1), strict=True):
        drafted.check(request, block)
    drafted.commit(1, [4, 44, 11])
    for request, block in zip((1, 2), drafted.expand(1, 2), strict=True):
        drafted.check(request, block)


def test_masks_keep_no_kv(drafted: Drafted) -> None:
    drafted.read(1, 0, len(TEXTS[1]) - 1)
    for _ in range(2):
        drafted.expand(1)
        assert drafted.source.pool.used == len(TEXTS[1]) - 1
    drafted.source.close(1)
    assert drafted.source.pool.used == 0


def test_a_block_after_a_gap_in_the_features(drafted: Drafted) -> None:
    drafted.read(1, 0, 2)
    drafted.read(1, 4, len(TEXTS[1]) - 1)
    (block,) = drafted.expand(1)
    drafted.check(1, block, first=4)


def test_mask_token_and_mask_features_are_required(drafted: Drafted) -> None:
    tensors = load_file(drafted.folder / "model.safetensors")
    del tensors["mask_hidden"]
    save_file(tensors, drafted.folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks mask_hidden \[1, 1, 96\]"):
        loaded(drafted.folder, drafted.target)
    config = json.loads((drafted.folder / "config.json").read_text())
    for wrong in (VOCABULARY, -1, "96"):
        changed = {**config, "ptd_token_id": wrong}
        (drafted.folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=f"mask token {wrong!r} .* none of {VOCABULARY} tokens"):
            head_config(drafted.folder, drafted.target)


@pytest.mark.parametrize(("depth", "block"), [(2, 2), (8, 3)])
def test_a_block_is_as_long_as_in_training_or_as_the_setting(
    tiny_target: Path, depth: int, block: int
) -> None:
    folder = write_peagle(tiny_target.parent / "head", tiny_target)
    found = load_source(folder, tiny_target, draft_depth=depth, eagle_layers="0,0,0")
    assert isinstance(found.source, PEagleSource)
    assert found.description.block == block
    assert found.description.features == (0, 0, 0)
    assert not found.description.keeps_tree
