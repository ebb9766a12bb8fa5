"""What an architecture counts before loading is what its checkpoint holds."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from ssd_serve.models.architectures.registry import ARCHITECTURES, architecture, load_description
from ssd_serve.models.parallel import Parallel
from tests.models import checkpoints

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 128}
FUSED = {"mlp": ("gate", "up"), "self_attn": ("q", "k", "v")}


@pytest.mark.parametrize("case", checkpoints.CASES)
def test_the_counts_are_those_of_the_file(case: str, tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make(case), tmp_path)
    sizes = load_description(folder).sizes(Parallel())
    held = {name: each for name, each in load_file(folder / "model.safetensors").items() if each.dim() == 2}
    embedding = held["model.embed_tokens.weight"]
    assert sizes.tied == ("lm_head.weight" not in held)
    head = held.pop("lm_head.weight", embedding)
    del held["model.embed_tokens.weight"]
    assert sizes.embedding == embedding.numel()
    assert sizes.elements == head.numel() + sum(each.numel() for each in held.values())
    assert sizes.outputs == sum(len(each) for each in (head, *held.values()))
    fused = [
        sum(held[f"model.layers.0.{block}.{name}_proj.weight"].numel() for name in names)
        for block, names in FUSED.items()
    ]
    assert sizes.largest == max(head.numel(), *fused)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_hold_all_of_it_between_them(ranks: int, tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("qwen2-biases", **HEADS), tmp_path)
    model = load_description(folder)
    whole, shares = model.sizes(Parallel()), [model.sizes(Parallel(rank, ranks)) for rank in range(ranks)]
    assert ranks in whole.ranks
    assert sum(each.elements for each in shares) == whole.elements
    assert sum(each.embedding for each in shares) == whole.embedding
    assert sum(each.kv[0].elements for each in shares) == whole.kv[0].elements


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_registered_architecture_exists(name: str) -> None:
    assert architecture(name).models
