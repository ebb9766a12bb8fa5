"""Compiled attention: a row's result depends, to the bit, only on what it sees. See also test_attention."""

import random
import shutil
import subprocess
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.kernels.attention.self_test import ReferenceAttention
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.kernels.native.attention import NativeAttention
from ssd_serve.kernels.native.library import SOURCES, NativeLibrary
from tests.examples import examples
from tests.kernels.test_attention import random_paths, rows_of

SLOTS = 512


@pytest.fixture(scope="session", params=["this processor", "any processor"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeLibrary:
    """The compiled kernels, and those that a processor without wide vectors gets."""
    found: NativeLibrary = request.getfixturevalue("native")
    if request.param == "this processor":
        return found
    path = tmp_path_factory.mktemp("portable") / "attention.so"
    compiler = shutil.which("cc") or shutil.which("gcc") or "clang"
    words = [compiler, "-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread"]
    sources = [str(SOURCES / name) for name in ("attention.c", "pool.c")]
    subprocess.run([*words, *sources, "-o", str(path), "-lm"], check=True)
    return NativeLibrary(path)


class Model:
    def __init__(
        self,
        library: NativeLibrary,
        seed: int,
        *,
        heads: int = 6,
        kv_heads: int = 2,
        head_dim: int = 64,
        window: int | None = None,
        slots: int = SLOTS,
        scale: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        layout = KVLayout((LayerKV(kv_heads, head_dim, window),), dtype)
        self.cache = KVCache(layout, slots, "cpu")
        data = torch.randn((slots, 2 * kv_heads, head_dim), generator=generator)
        self.cache.write(0, torch.arange(slots), data)
        self.queries = torch.randn((slots, heads + 1, head_dim), generator=generator)[:, :heads] * scale
        self.attention = NativeAttention(library, self.cache, heads)
        self.reference = ReferenceAttention(self.cache)

    def run(self, parts: Sequence[RequestRows], reference: bool = False) -> torch.Tensor:
        """The rows' results; the query of a row is that of its slot."""
        batch = build_batch(parts)
        queries = self.queries[torch.from_numpy(batch.write_slots)]
        if reference:
            return self.reference.run(0, queries, batch)
        return self.attention.run(0, queries, self.attention.plan(batch))


def part(prefix: Sequence[int], own: Sequence[int], paths: Sequence[list[int]] | None = None) -> RequestRows:
    """Rows of a request with the tree `own`; without paths it is a chunk."""
    paths = [list(range(node + 1)) for node in range(len(own))] if paths is None else list(paths)
    positions = [len(prefix) + len(path) - 1 for path in paths]
    return rows_of(range(len(own)), list(prefix), list(own), positions, paths)


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 2**32),
    before=st.sampled_from([0, 1, 15, 16, 31, 32, 33, 100, 300]),
    nodes=st.sampled_from([2, 9, 31, 32, 33, 65, 130]),
    shape=st.sampled_from([(6, 2, 64), (1, 1, 64), (8, 1, 24), (4, 4, 40), (13, 1, 16), (2, 1, 128)]),
    window=st.sampled_from([None, None, 7, 40]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_tree_rows_equal_plain_decoding(
    library: NativeLibrary,
    seed: int,
    before: int,
    nodes: int,
    shape: tuple[int, int, int],
    window: int | None,
    dtype: torch.dtype,
) -> None:
    """A node's result is, to the bit, that of its token decoded alone after its ancestors were committed."""
    rng = random.Random(seed)
    heads, kv_heads, head_dim = shape
    model = Model(
        library, seed, heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window, dtype=dtype
    )
    slots = rng.sample(range(SLOTS), before + nodes)
    prefix, own = slots[:before], slots[before:]
    paths = random_paths(rng, nodes)
    tree = model.run([part(prefix, own, paths)])
    for node in rng.sample(range(nodes), min(nodes, 6)):
        committed = [*prefix, *(own[index] for index in paths[node][:-1])]
        alone = model.run([part(committed, [own[node]])])
        assert torch.equal(tree[node], alone[0])


@pytest.mark.parametrize("window", [None, 50])
def test_chunks_of_any_length_give_the_same_rows(library: NativeLibrary, window: int | None) -> None:
    model = Model(library, 1, window=window)
    slots = random.Random(1).sample(range(SLOTS), 200)
    whole = model.run([part([], slots)])
    for step in (1, 7, 64):
        rows = [
            model.run([part(slots[:start], slots[start : start + step])]) for start in range(0, 200, step)
        ]
        assert torch.equal(torch.cat(rows), whole)


def test_rows_do_not_depend_on_batch_or_threads(library: NativeLibrary) -> None:
    model = Model(library, 2, slots=4096)
    rng = random.Random(2)
    slots = rng.sample(range(4096), 4096)
    parts: list[RequestRows] = []
    for nodes in (1, 9, 70, 3, 1, 150, 12):
        prefix = [slots.pop() for _ in range(rng.choice([0, 5, 120, 330]))]
        parts.append(part(prefix, [slots.pop() for _ in range(nodes)], random_paths(rng, nodes)))
    alone = torch.cat([model.run([one]) for one in parts])
    together = model.run(parts)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        on_three = model.run(parts)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(together, alone)
    assert torch.equal(on_three, alone)
    assert float((together - model.run(parts, reference=True)).abs().max()) < 1e-5


@pytest.mark.parametrize(("rows", "context"), [(1, 40000), (30, 9000)])
def test_long_contexts(library: NativeLibrary, rows: int, context: int) -> None:
    model = Model(library, 4, heads=4, kv_heads=1, head_dim=16, slots=context + rows)
    long = [part(range(context), range(context, context + rows))]
    result = model.run(long)
    assert float((result - model.run(long, reference=True)).abs().max()) < 1e-5


@pytest.mark.parametrize("scale", [0.0, 1e-3, 5.0, 100.0])
def test_flat_and_steep_scores(library: NativeLibrary, scale: float) -> None:
    """Weights from nearly equal ones to those of which most are 0."""
    model = Model(library, 5, scale=scale)
    batch = [part(range(300), range(300, 309))]
    assert float((model.run(batch) - model.run(batch, reference=True)).abs().max()) < 2e-5 * max(1.0, scale)


def test_row_without_visible_slots_gets_zeros(library: NativeLibrary) -> None:
    batch = [part([], [3, 4], [[], [0, 1]])]
    result = Model(library, 6).run(batch)
    assert torch.equal(result[0], torch.zeros_like(result[0]))
    assert torch.isfinite(result).all()
    assert result[1].any()


def test_native_write_equals_the_caches(library: NativeLibrary) -> None:
    model, expected = Model(library, 7), Model(library, 7)
    own = [5, 400, 17]
    rows = torch.randn((3, 10, 64), generator=torch.Generator().manual_seed(7))
    model.attention.write(0, rows[:, 6:], model.attention.plan(build_batch([part([], own)])))
    expected.cache.write(0, torch.tensor(own), rows[:, 6:])
    assert torch.equal(model.cache.keys(0), expected.cache.keys(0))
    assert torch.equal(model.cache.values(0), expected.cache.values(0))
