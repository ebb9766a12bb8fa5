"""Layers declare what they store: the cache allocates by kind, and backends serve a kind or refuse it by
name."""

from pathlib import Path

import pytest
import torch

from ssd_serve.base.errors import UserError
from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.kernels.attention.backends import AttentionOptions, attention_for, candidates
from ssd_serve.kernels.attention.sdpa import SdpaAttention
from ssd_serve.kernels.attention.self_test import Heads, ReferenceAttention, try_forms
from ssd_serve.kernels.batch import RequestRows, build_batch
from tests.cache.test_kv import ORDERS

LATENT = LayerKV(1, 24, kind="latent", value_dim=16, scale=0.3)
NARROW = LayerKV(2, 24, value_dim=8)
STATE = LayerKV(4, 16, kind="state", value_dim=8)


def cache_of(*layers: LayerKV, order: str = "heads") -> KVCache:
    layout = KVLayout(layers, torch.float32, "heads" if order == "heads" else "slots")
    return KVCache(layout, 32, "cpu", states=3)


@ORDERS
def test_latent_values_are_the_beginning_of_its_keys(order: str) -> None:
    cache = cache_of(LATENT, order=order)
    rows = torch.randn(2, *LATENT.stored)
    cache.write(0, torch.tensor([7, 3]), rows)
    assert torch.equal(cache.keys(0)[:, [7, 3]].transpose(0, 1), rows)
    assert torch.equal(cache.values(0)[:, [7, 3]].transpose(0, 1), rows[..., :16])
    assert cache.values(0).data_ptr() == cache.keys(0).data_ptr()
    assert cache.layout.bytes_per_slot == 24 * 4


@ORDERS
def test_values_may_be_narrower_than_keys(order: str) -> None:
    cache = cache_of(NARROW, order=order)
    rows = torch.randn(2, *NARROW.stored)
    cache.write(0, torch.tensor([7, 3]), rows)
    assert torch.equal(cache.keys(0)[:, [7, 3]].transpose(0, 1), rows[..., :24])
    assert torch.equal(cache.values(0)[:, [7, 3]].transpose(0, 1), rows[..., 24:])
    assert cache.layout.bytes_per_slot == 2 * (24 + 8) * 4


def test_recurrent_state_takes_memory_per_state_not_per_slot() -> None:
    cache = cache_of(LayerKV(2, 16), STATE)
    assert cache.state(1).shape == (3, 4, 16, 8)
    assert cache.layout.bytes_per_slot == 2 * 2 * 16 * 4
    assert cache.layout.bytes_per_state == 4 * 16 * 8 * 4


def test_latent_needs_one_head_and_values_inside_keys() -> None:
    with pytest.raises(ValueError, match="one head"):
        LayerKV(2, 24, kind="latent")
    with pytest.raises(ValueError, match="part of its keys"):
        LayerKV(1, 24, kind="latent", value_dim=25)


@pytest.mark.parametrize("layer", [LATENT, NARROW])
def test_sdpa_and_the_reference_agree_on_other_layers(layer: LayerKV) -> None:
    forms = [Heads(heads, layer.heads, layer.head_dim, torch.float32, layer) for heads in (4, 16)]
    assert all(each.right for each in try_forms(SdpaAttention, forms, "cpu"))


def test_reference_attends_latents_as_the_formula_says() -> None:
    cache = cache_of(LATENT)
    rows, queries = torch.randn(3, 1, 24), torch.randn(3, 5, 24)
    batch = build_batch([RequestRows([1, 2, 3], range(3), range(3), torch.zeros(0).int().numpy(), [])])
    reference = ReferenceAttention(cache)
    reference.write(0, rows, batch)
    found = reference.run(0, queries, batch)
    weights = (queries[2] @ rows[:, 0].T * 0.3).softmax(1)  # the last row sees all three
    torch.testing.assert_close(found[2].view(5, 16), weights @ rows[:, 0, :16])


@pytest.mark.parametrize("invariant", [False, True])
def test_latent_layers_are_served_by_a_backend_that_declares_them(tmp_path: Path, invariant: bool) -> None:
    options = AttentionOptions(folder=tmp_path, invariant=invariant)
    assert attention_for(options, cache_of(LATENT, LayerKV(2, 24)), 4, None).name == "sdpa"
    refused = {each.name: each.missing for each in candidates(cache_of(LATENT), None, tmp_path)}
    assert refused["native"] == "it does not serve layer 0, of kind 'latent'"


def test_recurrent_layers_are_refused_by_every_backend(tmp_path: Path) -> None:
    cache = cache_of(LayerKV(1, 24), STATE)
    with pytest.raises(UserError, match="sdpa: it does not serve layer 1, of kind 'state'"):
        attention_for(AttentionOptions(folder=tmp_path), cache, 4, None)
    with pytest.raises(UserError, match="'sdpa' cannot be used here: it does not serve layer 1"):
        attention_for(AttentionOptions("sdpa", tmp_path), cache, 4, None)


def test_plain_backends_refuse_an_unusual_scale(tmp_path: Path) -> None:
    found = candidates(cache_of(LayerKV(2, 16, scale=0.5)), None, tmp_path)
    refused = {each.name: each.missing for each in found}
    assert "value_dim or scale" in refused["native"]
    assert not refused["sdpa"]
