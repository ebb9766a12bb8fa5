"""The KV cache: what is written is read, in both orders of memory, and as pages."""

import pytest
import torch

from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV

SLOTS = 12
LAYERS = (LayerKV(2, 4), LayerKV(3, 8, window=5))
ORDERS = pytest.mark.parametrize("order", ["heads", "slots"])


def layout(order: str) -> KVLayout:
    """The test's layers in either order."""
    return KVLayout(LAYERS, torch.float32, "heads" if order == "heads" else "slots")


def written(cache: KVCache) -> list[torch.Tensor]:
    """Writes other numbers into each layer's slots 9, 0 and 4, and returns them, keys first."""
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randn((3, 2 * layer.heads, layer.head_dim), generator=generator) for layer in LAYERS]
    for index, rows in enumerate(numbers):
        cache.write(index, torch.tensor([9, 0, 4]), rows)
    return numbers


@ORDERS
def test_kv_writes_are_read_back(order: str) -> None:
    cache = KVCache(layout(order), SLOTS, "cpu")
    for index, rows in enumerate(written(cache)):
        heads, head_dim = LAYERS[index].heads, LAYERS[index].head_dim
        keys, values = cache.keys(index), cache.values(index)
        assert keys.shape == values.shape == (heads, SLOTS, head_dim)
        for row, slot in enumerate([9, 0, 4]):
            assert torch.equal(keys[:, slot], rows[row, :heads])
            assert torch.equal(values[:, slot], rows[row, heads:])
        untouched = [slot for slot in range(SLOTS) if slot not in (9, 0, 4)]
        assert not keys[:, untouched].any()
        assert not values[:, untouched].any()


@ORDERS
def test_writing_through_a_slice_of_a_wider_tensor(order: str) -> None:
    """Layers hand over a part of the product that also holds the queries: its rows are not contiguous."""
    cache = KVCache(layout(order), SLOTS, "cpu")
    wide = torch.randn((2, 9, 4), generator=torch.Generator().manual_seed(1))
    cache.write(0, torch.tensor([3, 11]), wide[:, 5:])
    assert torch.equal(cache.keys(0)[:, [3, 11]], wide[:, 5:7].transpose(0, 1))
    assert torch.equal(cache.values(0)[:, [3, 11]], wide[:, 7:].transpose(0, 1))


@pytest.mark.parametrize("page_size", [1, 3, 4, 5])
def test_pages_are_views_of_the_slots_in_order(page_size: int) -> None:
    """Slots behind the last whole page are in none."""
    cache = KVCache(layout("slots"), SLOTS, "cpu")
    written(cache)
    for index, layer in enumerate(LAYERS):
        keys, values = cache.pages(index, page_size)
        assert keys.shape == values.shape == (SLOTS // page_size, page_size, layer.heads, layer.head_dim)
        assert keys.stride() == values.stride()  # kernels take one set of strides for both
        assert keys.stride(-1) == 1
        for slot in range(SLOTS // page_size * page_size):
            page, place = divmod(slot, page_size)
            assert torch.equal(keys[page, place], cache.keys(index)[:, slot])
            assert torch.equal(values[page, place], cache.values(index)[:, slot])
        keys[1, 0] = 7.0
        assert (cache.keys(index)[:, page_size] == 7.0).all()


def test_pages_need_slots_first() -> None:
    with pytest.raises(ValueError, match='order "slots"'):
        KVCache(layout("heads"), SLOTS, "cpu").pages(0, 1)


@ORDERS
def test_bytes_of_a_slot(order: str) -> None:
    cache = KVCache(layout(order), SLOTS, "cpu")
    held = sum(2 * cache.keys(index).numel() for index in range(len(LAYERS))) * 4
    assert cache.layout.bytes_per_slot * SLOTS == held
