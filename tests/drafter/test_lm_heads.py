"""Medusa's and Hydra's heads against plain torch, in the layouts in which they are published."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from ssd_serve.base.errors import CheckpointError, ProtocolError
from ssd_serve.base.logs import get_logger
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.base.settings import Settings
from ssd_serve.cache.node import Node
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.drafter.assembly import load_draft
from ssd_serve.drafter.sources.contract import Block, Candidates, NodeRequest
from ssd_serve.drafter.sources.lm_heads.source import LmHeadSource
from ssd_serve.drafter.sources.loading import LoadedSource
from ssd_serve.models.heads.kinds import HeadKind, head_kind
from ssd_serve.sampling.noise_rows import NoiseRows
from tests.end_to_end.tiny_pair import write_hydra, write_medusa, write_model

GREEDY = SamplingParameters(temperature=0.0)
HIDDEN, VOCABULARY, FAN_OUT, HEADS = 32, 257, 3, 3
TEXT = [5, 9, 60, 33, 2, 71, 8, 13]
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    write_model(tmp_path / "target", seed=1, noise=0.0)
    return tmp_path / "target"


def loaded(folder: Path, target: Path, **settings: Any) -> LoadedSource:
    sizes: dict[str, Any] = {
        "draft_kv_memory_mb": 16,
        "draft_width": 4,
        "draft_fan_out": FAN_OUT,
        "native_kernels": False,
    }
    wanted = Settings(target=str(target), draft=str(folder), dtype="fp32", **sizes, **settings)
    return load_draft(wanted.engine_config(), str(folder), "cpu", None, get_logger("d0"))


def load(folder: Path, target: Path, **settings: Any) -> LmHeadSource:
    source = loaded(folder, target, **settings).source
    assert isinstance(source, LmHeadSource)
    return source


def features(seed: int = 5) -> torch.Tensor:
    """Features of all positions of the text."""
    return torch.randn(len(TEXT), HIDDEN, generator=torch.Generator().manual_seed(seed))


def medusa(tensors: Tensors, head: int, feature: torch.Tensor) -> torch.Tensor:
    """Head i of the original layout: x + SiLU(W x + b), then the LM head."""
    x, layer = feature, 0
    while f"{head}.{layer}.linear.weight" in tensors:
        matrix, bias = (tensors[f"{head}.{layer}.linear.{each}"] for each in ("weight", "bias"))
        x = x + functional.silu(matrix @ x + bias)
        layer += 1
    return tensors[f"{head}.{layer}.weight"] @ x


def hydra(
    tensors: Tensors, embedding: torch.Tensor, feature: torch.Tensor, since: Sequence[int]
) -> torch.Tensor:
    """The head that reads the feature and all the tokens since."""
    head = len(since) - 1
    x = torch.cat((feature, *(embedding[token] for token in since)))
    layer = {
        each: tensors[f"hydra_mlp.{head}.0.{each}.weight"] @ x + tensors[f"hydra_mlp.{head}.0.{each}.bias"]
        for each in ("linear", "res_connection")
    }
    x = layer["res_connection"] + functional.silu(layer["linear"])
    if f"hydra_mlp.{head}.2.linear.weight" in tensors:
        second = f"hydra_mlp.{head}.2.linear"
        x = x + functional.silu(tensors[f"{second}.weight"] @ x + tensors[f"{second}.bias"])
    return tensors[f"hydra_lm_head.{head}.weight"] @ x + tensors[f"hydra_lm_head.{head}.bias"]


def check(found: Candidates, logits: torch.Tensor) -> None:
    wanted = logits.log_softmax(-1).topk(FAN_OUT)
    assert found.tokens.tolist() == wanted.indices.tolist()
    np.testing.assert_allclose(found.log_probabilities, wanted.values.numpy(), atol=1e-4)


def levels(block: object) -> list[Candidates]:
    assert isinstance(block, Block)
    return [Candidates(*each) for each in zip(*block[:3], block.expected_scores.tolist(), strict=True)]


def node_of(tree: SpeculationTree, *path: int) -> Node:
    node = tree.root
    for token in path:
        tree.expand(node, [token], [-1.0])
        node = tree.child_at(node, node.tokens.index(token))
    return node


def opened(source: LmHeadSource, request: int, count: int) -> SpeculationTree:
    source.open(request, TEXT[:count], GREEDY, 0)
    return SpeculationTree(request, 100)


@pytest.mark.parametrize("known", [3, 4, 5])
def test_medusa_block_after_the_last_feature_with_and_without_a_gap(target: Path, known: int) -> None:
    """Head i guesses the token i + 2 places after the feature; the root is at position 5."""
    folder = write_medusa(target.parent / "medusa", target, HEADS)
    source, tensors = load(folder, target), load_file(folder / "medusa_lm_head.safetensors")
    tree = opened(source, 1, 6)
    assert source.expand([NodeRequest(1, tree.root)], [(1.0,)]) == [None]
    source.read(1, 0, features()[:known])
    gap = 5 - known
    child = node_of(tree, 7)
    found = source.expand([NodeRequest(1, tree.root), NodeRequest(1, child)], [(1.0,)] * 2)
    for anchor, block in enumerate(found):
        heads = range(gap + anchor, HEADS)
        if not heads:
            assert block is None
            continue
        for head, level in zip(heads, levels(block), strict=True):
            check(level, medusa(tensors, head, features()[known - 1]))


def test_medusa_follows_commits_and_several_requests(target: Path) -> None:
    folder = write_medusa(target.parent / "medusa", target, HEADS)
    source, tensors = load(folder, target), load_file(folder / "medusa_lm_head.safetensors")
    trees = {request: opened(source, request, 3) for request in (1, 2)}
    for request in trees:
        source.read(request, 0, features(request)[:2])
    source.read(1, 2, features(1)[2:5])  # before the tokens of that round
    for committed in ((), TEXT[3:6]):
        if committed:
            source.commit(1, committed, [], [])
        found = source.expand([NodeRequest(each, trees[each].root) for each in trees], [(1.0,)] * 2)
        for (request, last), block in zip(((1, 1 + len(committed)), (2, 1)), found, strict=True):
            for head, level in enumerate(levels(block)):
                check(level, medusa(tensors, head, features(request)[last]))
    source.read(1, 7, features(1)[7:])  # after a gap the earlier ones are forgotten
    assert source.expand([NodeRequest(1, trees[1].root)], [(1.0,)]) == [None]
    source.close(1)
    source.read(1, 0, features())
    with pytest.raises(ProtocolError, match="width 31, not 32"):
        source.read(2, 2, torch.zeros(1, 31))


@pytest.mark.parametrize("known", [4, 5])
def test_hydra_reads_the_tokens_since_the_feature(target: Path, known: int) -> None:
    folder = write_hydra(target.parent / "hydra", target, HEADS)
    source, tensors = load(folder, target), load_file(folder / "model.safetensors")
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    tree = opened(source, 1, 6)
    source.read(1, 0, features()[:known])
    paths = [(7,), (), (7, 30), (7, 30, 41)]
    found = source.expand([NodeRequest(1, node_of(tree, *path)) for path in paths], [(1.0,)] * 4)
    for path, candidates in zip(paths, found, strict=True):
        since = [*TEXT[known:6], *path]
        if len(since) > HEADS:
            assert candidates is None
            continue
        assert isinstance(candidates, Candidates)
        check(candidates, hydra(tensors, embedding, features()[known - 1], since))


def test_drafted_tokens_have_the_noise_of_their_positions(target: Path) -> None:
    folder = write_medusa(target.parent / "medusa", target, HEADS)
    source, tensors = load(folder, target), load_file(folder / "medusa_lm_head.safetensors")
    source.open(1, TEXT[:6], SamplingParameters(temperature=0.7), 9)
    source.read(1, 0, features()[:5])
    (block,) = source.expand([NodeRequest(1, SpeculationTree(1, 9).root)], [(1.0,)])
    noise = NoiseRows(VOCABULARY, 8)
    for head, level in enumerate(levels(block)):
        check(level, medusa(tensors, head, features()[4]) / 0.7 - noise.rows([9], [6 + head])[0])


def renamed(tensors: Tensors, folder: Path, **config: object) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_medusa_in_the_layout_of_vllm_with_a_reduced_vocabulary(target: Path) -> None:
    tensors = load_file(write_medusa(target.parent / "medusa", target, HEADS) / "medusa_lm_head.safetensors")
    ids = torch.arange(3, VOCABULARY, 4)
    named = {f"blocks.{head}.layers.0.weight": tensors[f"{head}.0.linear.weight"] for head in range(HEADS)}
    named |= {f"lm_heads.{head}.weight": tensors[f"{head}.1.weight"][ids] for head in range(HEADS)}
    sizes = {"num_heads": HEADS, "truncated_vocab_size": len(ids), "medusa_fc_bias": False}
    folder = renamed(
        {**named, "token_map": ids}, target.parent / "vllm", architectures=["MedusaModel"], **sizes
    )
    source = load(folder, target)
    tree = opened(source, 1, 6)
    source.read(1, 0, features()[:5])
    (block,) = source.expand([NodeRequest(1, tree.root)], [(1.0,)])
    for head, level in enumerate(levels(block)):
        tensors[f"{head}.0.linear.bias"].zero_()
        logits = torch.full((VOCABULARY,), -torch.inf)
        logits[ids] = medusa(tensors, head, features()[4])[ids]
        check(level, logits)


def test_pickled_heads_with_dropouts_and_two_layers(target: Path) -> None:
    """Dropouts take numbers in `hydra_mlp.{i}.{j}`; the file may repeat the target's embedding."""
    folder = write_hydra(target.parent / "hydra", target, HEADS)
    tensors = load_file(folder / "model.safetensors")
    for head in range(HEADS):
        tensors[f"hydra_mlp.{head}.2.linear.weight"] = 0.2 * torch.randn(HIDDEN, HIDDEN)
        tensors[f"hydra_mlp.{head}.2.linear.bias"] = torch.randn(HIDDEN)
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, "input_embed_fn.weight": embedding}, folder / "hydra_lm_head.pt")
    with pytest.raises(
        CheckpointError, match=r"hydra_lm_head\.pt is not safetensors; such files are pickles"
    ):
        load(folder, target)
    source = load(folder, target, allow_pickle=True)
    tree = opened(source, 1, 6)
    source.read(1, 0, features()[:5])
    (found,) = source.expand([NodeRequest(1, tree.root)], [(1.0,)])
    assert isinstance(found, Candidates)
    check(found, hydra(tensors, embedding, features()[4], TEXT[5:6]))


def test_kinds_and_refused_heads(target: Path) -> None:
    folder = write_hydra(target.parent / "hydra", target, HEADS)
    assert head_kind(folder) is HeadKind.HYDRA
    config = json.loads((folder / "config.json").read_text())
    for keys, message in (
        (
            {"hydra_head_arch": "prefix-mlp"},
            "hydra_head_arch 'prefix-mlp' and grounded_heads True are not supp",
        ),
        ({"grounded_heads": False}, "hydra_head_arch 'mlp' and grounded_heads False are not supp"),
        ({"hidden_state_offset": 1}, "inner hidden state"),
        ({"draft_vocab_size": 9}, "proposes 9 of 257 tokens, and has no d2t, nor token_map"),
    ):
        (folder / "config.json").write_text(json.dumps(config | keys))
        with pytest.raises(CheckpointError, match=message):
            load(folder, target)
    medusa_folder = write_medusa(target.parent / "medusa", target, HEADS)
    assert head_kind(medusa_folder) is HeadKind.MEDUSA
    tensors = load_file(medusa_folder / "medusa_lm_head.safetensors")
    del tensors["1.1.weight"]
    save_file({**tensors, "extra": torch.zeros(1)}, medusa_folder / "medusa_lm_head.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 1\.1\.weight \[257, 32\], it has unknown extra \[1\]"):
        load(medusa_folder, target)
