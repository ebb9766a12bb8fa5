"""A Gumiho head against plain torch over whole texts, in the layouts in which heads are published."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from ssd_serve.base.draft_messages import FINAL
from ssd_serve.base.errors import CheckpointError
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.drafter.sources.contract import Candidates, NodeRequest
from ssd_serve.drafter.sources.gumiho.source import GumihoSource
from tests.drafter.test_lm_heads import (
    HEADS,
    HIDDEN,
    VOCABULARY,
    check,
    levels,
    loaded,
    node_of,
    target,
)
from tests.end_to_end.tiny_pair import write_gumiho

__all__ = ["target"]

HEAD = 16
TEXTS = {1: [5, 9, 60, 33, 2, 71, 8, 13], 2: [7, 7, 8, 90]}
Tensors = dict[str, torch.Tensor]


class Reference:
    """The computation of the notes on one text: rows of a token and the vector before it, from position 1 on."""

    def __init__(self, tensors: Tensors, target: Tensors) -> None:
        self.w, self.prefix = tensors, "mlp.mlp" if "mlp.mlp.0.0.linear.weight" in tensors else "mlp"
        self.embedding, self.output = target["model.embed_tokens.weight"], target["lm_head.weight"]
        self.forbidden = torch.zeros(VOCABULARY)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.w[f"{name}.weight"] * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    def join(self, tokens: Sequence[int], vectors: torch.Tensor) -> torch.Tensor:
        return self.linear("fc", torch.cat((self.embedding[list(tokens)], vectors), -1))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, heads, HEAD], by row."""
        angles = torch.arange(len(x))[:, None, None] / 10000.0 ** (torch.arange(0, HEAD, 2) / HEAD)
        one, two = x.chunk(2, -1)
        return torch.cat(
            (one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()), -1
        )

    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Causal; the first layer has no norm of its input."""
        name, count = f"layers.{index}", len(x)
        rows = self.norm(f"{name}.input_layernorm", x) if index else x
        q, k, v = (self.linear(f"{name}.self_attn.{each}_proj", rows).view(count, -1, HEAD) for each in "qkv")
        scores = torch.einsum("qhd,kgd->hqk", self.rotate(q), self.rotate(k)) / math.sqrt(HEAD)
        scores = scores + torch.full((count, count), -torch.inf).triu(1)
        mixed = torch.einsum("hqk,kgd->qhd", scores.softmax(-1), v).reshape(count, -1)
        x = x + self.linear(f"{name}.self_attn.o_proj", mixed)
        rows = self.norm(f"{name}.post_attention_layernorm", x)
        gate, up = (self.linear(f"{name}.mlp.{each}_proj", rows) for each in ("gate", "up"))
        return x + self.linear(f"{name}.mlp.down_proj", functional.silu(gate) * up)

    def vectors(self, tokens: Sequence[int], features: torch.Tensor) -> torch.Tensor:
        """The layers' last output; `features` are those before each of the tokens."""
        x = self.join(tokens, features)
        for index in range(2):
            x = self.layer(index, x)
        return x[-1]

    def logits(self, text: Sequence[int], features: torch.Tensor, path: Sequence[int]) -> list[torch.Tensor]:
        """Logits of the token after a path, and of the tokens that later heads guess."""
        known = [*features[: len(text) - 1]]
        for count in range(min(len(path), 2) + 1):
            tokens = [*text[1:], *path[:count]]
            if count < 2:
                known.append(self.vectors(tokens, torch.stack(known)))
        if len(path) < 2:
            return [self.output @ known[-1]]
        both = torch.cat([*self.join(path[:2], torch.stack(known[-2:]))])
        found: list[torch.Tensor] = []
        for head in range(len(path) - 2, HEADS):
            x = functional.silu(self.linear(f"{self.prefix}.{head}.0.linear", both))
            for block in range(1, 6):
                x = x + functional.silu(self.linear(f"{self.prefix}.{head}.{block}.linear", x))
            found.append(self.output @ x)
        return found


class Drafted:
    """A source, its reference, and two requests with features of all positions."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.folder, self.target = folder, target
        self.reference = Reference(
            load_file(folder / "model.safetensors"), load_file(target / "model.safetensors")
        )
        self.load()
        self.features = {
            each: torch.randn(len(text), HIDDEN, generator=torch.Generator().manual_seed(each))
            for each, text in TEXTS.items()
        }
        self.trees: dict[int, SpeculationTree] = {}
        self.texts = {each: list(text) for each, text in TEXTS.items()}

    def load(self, **settings: Any) -> None:
        found = loaded(self.folder, self.target, **settings)
        assert isinstance(found.source, GumihoSource)
        self.source, self.description = found.source, found.description

    def open(self) -> None:
        for each, text in self.texts.items():
            self.source.open(each, text, SamplingParameters(temperature=0.0), 0)
            self.source.read(each, 0, self.features[each][: len(text) - 1])
            self.trees[each] = SpeculationTree(each, 1000)

    def check(self, *places: tuple[int, tuple[int, ...]]) -> None:
        nodes = [NodeRequest(request, node_of(self.trees[request], *path)) for request, path in places]
        found = self.source.expand(nodes, [(1.0,)] * len(nodes))
        for (request, path), result in zip(places, found, strict=True):
            wanted = self.reference.logits(self.texts[request], self.features[request], path)
            rows = levels(result) if len(path) >= 2 else [result]
            for row, logits in zip(rows, wanted, strict=True):
                assert isinstance(row, Candidates)
                check(row, logits + self.reference.forbidden)


@pytest.fixture
def drafted(target: Path) -> Drafted:
    return Drafted(write_gumiho(target.parent / "gumiho", target, HEADS), target)


def test_layers_node_by_node_then_blocks_of_the_heads(drafted: Drafted) -> None:
    assert drafted.description.features == (FINAL,)
    assert drafted.description.depth == 2 + HEADS
    drafted.open()
    drafted.check((1, ()), (2, ()))
    drafted.check((1, (40,)), (2, (41,)), (1, (42,)))
    drafted.check((1, (40, 50)), (2, (43,)), (1, (42, 50)), (2, (41, 9)), (1, (40, 51)), (1, (40, 50, 3)))
    drafted.check((1, (40, 50, 3, 4)))
    assert drafted.source.expand(
        [NodeRequest(1, node_of(drafted.trees[1], *(40, 50, 3, 4, 5)))], [(1.0,)]
    ) == [None]
    assert drafted.source.expand([NodeRequest(1, node_of(drafted.trees[1], *(44, 50)))], [(1.0,)]) == [None]


def test_accepted_tokens_are_computed_again_with_their_features(drafted: Drafted) -> None:
    drafted.texts[1] = TEXTS[1][:5]
    drafted.open()
    drafted.check((1, ()))
    drafted.check((1, (71,)))
    drafted.source.read(1, 4, drafted.features[1][4:7])
    advance = drafted.trees[1].advance(TEXTS[1][5:])
    drafted.source.commit(1, TEXTS[1][5:], [node.name for node in advance.path], [])
    drafted.texts[1] = TEXTS[1]
    drafted.check((1, ()))
    drafted.check((1, (40,)))
    drafted.check((1, (40, 50)))
    drafted.source.close(1)
    drafted.source.close(2)
    assert drafted.source.pool.used == 0


def test_other_names_own_embedding_and_reduced_vocabulary(target: Path) -> None:
    """As published the file is a pickle and repeats the embedding; `d2t` chooses rows of the target's LM head."""
    folder = write_gumiho(target.parent / "gumiho", target, HEADS)
    tensors, ids = load_file(folder / "model.safetensors"), torch.arange(1, VOCABULARY, 3)
    drafted = Drafted(folder, target)
    named = {f"mlp.{name}" if name.startswith("mlp.") else name: tensor for name, tensor in tensors.items()}
    named["embed_tokens.weight"] = drafted.reference.embedding
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"draft_vocab_size": len(ids)}))
    (folder / "model.safetensors").unlink()
    torch.save({**named, "d2t": ids - torch.arange(len(ids))}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="such files are pickles"):
        drafted.load()
    drafted.load(allow_pickle=True)
    others = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, ids, False)
    drafted.reference.forbidden = torch.zeros(VOCABULARY).masked_fill(others, -torch.inf)
    drafted.open()
    drafted.check((1, ()))
    drafted.check((1, (40,)))
    drafted.check((1, (40, 50)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hidden_layers": 3}, "an Gumiho head of 3 layers is not supported, only of 2"),
        ({"vocab_size": 99}, "a head for targets of width 32 with 99 tokens"),
    ],
)
def test_heads_that_do_not_fit_are_refused(target: Path, changed: dict[str, Any], message: str) -> None:
    folder = write_gumiho(target.parent / "gumiho", target, HEADS)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(CheckpointError, match=message):
        Drafted(folder, target)


def test_missing_and_unknown_tensors_are_listed(target: Path) -> None:
    folder = write_gumiho(target.parent / "gumiho", target, HEADS)
    tensors = load_file(folder / "model.safetensors")
    del tensors["mlp.1.4.linear.bias"]
    save_file(tensors | {"norm.weight": torch.ones(HIDDEN)}, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"lacks mlp\.1\.4\.linear\.bias \[32\], it has unknown norm\.w"
    ):
        Drafted(folder, target)
