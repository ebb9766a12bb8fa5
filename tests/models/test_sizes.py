"""Counts of an architecture before loading are those of its checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ssd_serve.app.plan.known_models import Computing, sized
from ssd_serve.base.errors import MemoryShortError, UserError
from ssd_serve.models import load, memory
from ssd_serve.models.architectures.contract import Sizes
from ssd_serve.models.architectures.registry import ARCHITECTURES, architecture, load_description
from ssd_serve.models.load import ModelOptions, load_sized
from ssd_serve.models.parallel import Parallel
from ssd_serve.models.sizes import sizes_of
from tests.models import checkpoints

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 128}
FUSED = {"mlp": ("gate", "up"), "self_attn": ("q", "k", "v")}


@pytest.mark.parametrize("case", checkpoints.CASES)
def test_counts_equal_those_of_the_file(case: str, tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make(case), tmp_path)
    sizes = load_description(folder).sizes(Parallel())
    held = {name: each for name, each in load_file(folder / "model.safetensors").items() if each.dim() == 2}
    embedding = held["model.embed_tokens.weight"]
    assert sizes.tied == ("lm_head.weight" not in held)
    head = held.pop("lm_head.weight", embedding)
    del held["model.embed_tokens.weight"]
    assert sizes.embedding == embedding.numel()
    assert sizes.read == sizes.resident == head.numel() + sum(each.numel() for each in held.values())
    assert sizes.outputs == sum(len(each) for each in (head, *held.values()))
    fused = [
        sum(held[f"model.layers.0.{block}.{name}_proj.weight"].numel() for name in names)
        for block, names in FUSED.items()
    ]
    assert sizes.largest == max(head.numel(), *fused)


def test_dimension_that_ranks_cannot_split_is_refused() -> None:
    assert [Parallel(rank, 3).part(12) for rank in range(3)] == [slice(0, 4), slice(4, 8), slice(8, 12)]
    with pytest.raises(UserError, match="cannot be split"):
        Parallel(0, 5).part(12)


@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_of_ranks_sum_to_the_whole(ranks: int, tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("qwen2-biases", **HEADS), tmp_path)
    model = load_description(folder)
    whole, shares = model.sizes(Parallel()), [model.sizes(Parallel(rank, ranks)) for rank in range(ranks)]
    assert ranks in whole.ranks
    assert sum(each.resident for each in shares) == whole.resident
    assert sum(each.embedding for each in shares) == whole.embedding
    assert sum(each.kv[0].elements for each in shares) == whole.kv[0].elements


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_registered_architecture_exists(name: str) -> None:
    assert architecture(name).models


def test_sparse_model_reads_active_and_holds_all_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory check goes by what is resident, cost and plan by what one row's forward reads."""
    folder = checkpoints.save(checkpoints.make("llama3-gqa-tied"), tmp_path)
    dense = load_description(folder)

    def eight_experts(config: Any, parallel: Parallel) -> Sizes:
        sizes = dense.architecture.sizes(config, parallel)
        qkv, output, gate_up, down = sizes.matrices
        experts = [replace(each, count=8 * each.count, active=2 * each.count) for each in (gate_up, down)]
        return replace(sizes, matrices=(qkv, output, *experts))

    sparse = replace(dense, architecture=replace(dense.architecture, sizes=eight_experts))
    options: Any = {"device": "cpu", "dtype": "fp32"}
    one, eight = sizes_of(dense, folder, **options), sizes_of(sparse, folder, **options)
    expert = 4 * sum(each.resident for each in dense.sizes(Parallel()).matrices[2:])
    assert eight.read_bytes == one.read_bytes + expert
    assert eight.resident_bytes == one.resident_bytes + 7 * expert
    planned = sized("sparse", sparse, Computing("cpu", torch.float32))
    assert (planned.matrix_bytes, planned.resident_bytes) == (eight.read_bytes, eight.resident_bytes)
    assert planned.flops_per_row == 2 * eight.read_bytes / 4
    free = one.resident_bytes + 2 * expert
    monkeypatch.setattr(load, "available_memory", lambda _device: free + (300 << 20))
    monkeypatch.setattr(memory, "_RESERVE", 300 << 20)
    wanted = ModelOptions(slots=1, context=None, **options)
    load_sized(folder, wanted, one)
    with pytest.raises(MemoryShortError):
        load_sized(folder, wanted, eight)
