"""The reference of tree attention, and the self-test that compares a backend with it before it serves.

Wrong kernels have existed that looked right at first: a softmax denominator read in the wrong format, masks
applied to the wrong head of a group. So random trees in scattered slots, chunks, single rows and windows are
compared with the obvious reference, for every shape of heads. Knows no model.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ssd_serve.base.errors import in_a_line
from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.kernels.attention.contract import AttentionBackend, Capturable, Maker
from ssd_serve.kernels.attention.sdpa import SdpaAttention
from ssd_serve.kernels.batch import Batch, RequestRows, build_batch, padded
from ssd_serve.kernels.device import Clock, captured_rows, device_clock, dtype_name, layout_order

RATIOS = ((4, 4), (16, 4), (32, 4))
"""Query heads and KV heads: alone, and groups of four and eight."""
_WINDOW = 11
ALLOWED = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference from the reference, for values of about 1: some units of the last place."""
_OBVIOUS = 200_000
"""Products of rows, heads and mean context beyond which torch's attention in float32 on the CPU, itself held
to the obvious reference below that, stands in for it."""


class RequestShape(NamedTuple):
    """Request of a random batch: `prefix` committed tokens, `rows` rows, a random tree no deeper than
    `depth`; depth 0: a causal chunk. `in_order`: the prefix lies in slots one after the other, as prompts do.
    """

    prefix: int
    rows: int
    depth: int = 16
    in_order: bool = False


SMALL = (
    (RequestShape(37, 24), RequestShape(0, 9, depth=0), RequestShape(1, 3), RequestShape(70, 1)),
    (RequestShape(0, 1), RequestShape(5, 1), RequestShape(64, 1)),
    (RequestShape(1100, 1, in_order=True), RequestShape(3, 70)),
)
"""Trees and a chunk; single rows, as in plain decoding; more context than a kernel reads at once, and more
nodes than a word has bits."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of the heads that a backend is tried with."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    like: LayerKV | None = None
    """Layer that gives the kind, value_dim and scale; None: a plain one."""

    def layer(self, window: int | None = None) -> LayerKV:
        """Return such a layer."""
        plain = LayerKV(self.kv_heads, self.head_dim, window)
        return plain if self.like is None else replace(self.like, window=window)

    def __str__(self) -> str:
        kind = "" if self.like is None or self.like.is_plain else f"{self.like.kind} "
        return f"{self.heads}/{self.kv_heads} {kind}heads of {self.head_dim} in {dtype_name(self.dtype)}"


@dataclass(frozen=True, slots=True)
class Trial:
    """Outcome of a trial: the largest difference."""

    heads: Heads
    error: float

    @property
    def right(self) -> bool:
        """Return True if the difference is rounding."""
        return self.error <= ALLOWED[self.heads.dtype]

    def __str__(self) -> str:
        return f"{self.heads}: off by {self.error:.2g}"


def visible_slots(batch: Batch, row: int, window: int | None) -> list[int]:
    """Return the slots that a row attends to: its request's prefix and its ancestors, inside the window."""
    request = next(r for r in range(batch.requests) if row < int(batch.request_offsets[r + 1]))
    prefix = batch.prefix_slots[batch.prefix_offsets[request] : batch.prefix_offsets[request + 1]]
    tree = slice(int(batch.tree_offsets[request]), int(batch.tree_offsets[request + 1]))
    places = [(int(slot), position) for position, slot in enumerate(prefix)]
    pairs = zip(batch.tree_slots[tree], batch.tree_positions[tree], strict=True)
    for index, (slot, position) in enumerate(pairs):
        if int(batch.ancestry[row, index // 64]) >> (index % 64) & 1:
            places.append((int(slot), int(position)))
    first = -1 if window is None else int(batch.positions[row]) - window
    return [slot for slot, position in places if position > first]


class ReferenceAttention:
    """Attends in float64 over all slots of the cache, unseen ones masked: slow and obvious. The plan is the batch
    itself.

    Serves layers of any kind but states.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    @property
    def dtype(self) -> torch.dtype:
        return self._cache.layout.dtype

    def plan(self, batch: Batch) -> Batch:
        return batch

    def write(self, layer: int, stored: torch.Tensor, plan: Batch) -> None:
        self._cache.write(layer, torch.from_numpy(plan.write_slots), stored)

    def run(self, layer: int, queries: torch.Tensor, plan: Batch) -> torch.Tensor:
        return self.run_with_lse(layer, queries, plan)[0]

    def run_with_lse(
        self, layer: int, queries: torch.Tensor, plan: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, heads, _ = queries.shape
        shape = self._cache.layout.layers[layer]
        keys, values = self._cache.keys(layer).double(), self._cache.values(layer).double()
        group = heads // keys.shape[0]
        seen = torch.zeros(rows, keys.shape[1], dtype=torch.bool)
        for row in range(rows):
            seen[row, visible_slots(plan, row, shape.window)] = True
        keys, values = (each.repeat_interleave(group, 0) for each in (keys, values))  # [heads, slots, width]
        scores = queries.double().transpose(0, 1) @ keys.transpose(1, 2) * shape.scale  # [heads, rows, slots]
        scores = scores.masked_fill(~seen, -torch.inf)
        weights = torch.softmax(scores, -1).nan_to_num()  # a row that sees nothing gets zeros
        result = (weights @ values).transpose(0, 1)  # [rows, heads, width]
        return result.flatten(1).to(queries.dtype), torch.logsumexp(scores, -1).T.float()


def self_test(
    make: Maker, dtype: torch.dtype, head_dim: int, device: str, ratios: Sequence[tuple[int, int]] = RATIOS
) -> list[Trial]:
    """Try a backend with every ratio of heads. Raises the backend's errors."""
    return try_forms(make, [Heads(heads, kv_heads, head_dim, dtype) for heads, kv_heads in ratios], device)


def try_forms(make: Maker, forms: Sequence[Heads], device: str) -> list[Trial]:
    """Try a backend with these heads. Raises the backend's errors."""
    return [Trial(form, max(largest_error(make, form, asked, device) for asked in SMALL)) for form in forms]


def first_failure(
    make: Maker, dtype: torch.dtype, head_dim: int, device: str, ratios: Sequence[tuple[int, int]] = RATIOS
) -> str:
    """Describe what is wrong with a backend in any ratio of heads; empty: nothing."""
    return failure_of(make, [Heads(heads, kv_heads, head_dim, dtype) for heads, kv_heads in ratios], device)


def failure_of(make: Maker, forms: Sequence[Heads], device: str) -> str:
    """Describe what is wrong with a backend; empty: nothing."""
    try:
        trials = try_forms(make, forms, device)
    except Exception as error:  # any error of a foreign kernel or its compiler
        return in_a_line(error)
    return next((str(trial) for trial in trials if not trial.right), "")


def largest_error(make: Maker, form: Heads, asked: Sequence[RequestShape], device: str) -> float:
    """Run one batch through a layer without a window and one with, and compare outputs and log-sum-exps.

    Where forwards can be captured, the batch is padded and planned as for a capture.
    """
    slots = 64 + sum(each.prefix + each.rows for each in asked)
    layers = (form.layer(), form.layer(_WINDOW))
    stored = layers[0].stored
    generator = torch.Generator().manual_seed(form.heads)
    ours = KVCache(KVLayout(layers, form.dtype, order=layout_order(device)), slots + 1, device)
    theirs = KVCache(KVLayout(layers, torch.float32), slots + 1, "cpu")
    batch = random_batch(random.Random(slots), slots, asked)
    entries = sum(each.rows * (each.prefix + each.rows) for each in asked)
    obvious = entries * form.heads < _OBVIOUS
    right: Any = ReferenceAttention(theirs) if obvious else SdpaAttention(theirs, form.heads)
    tried = make(ours, form.heads)
    rows = captured_rows(batch.rows)
    real = batch.rows
    if isinstance(tried, Capturable) and rows is not None:
        batch = padded(batch, rows, slots)
    plans: tuple[Any, Any] = _plan_of(tried, batch), right.plan(batch)
    worst = 0.0
    for layer in range(len(layers)):
        filled = torch.randn((slots, *stored), generator=generator).to(form.dtype)
        ours.write(layer, torch.arange(slots, device=device), filled.to(device))
        theirs.write(layer, torch.arange(slots), filled.float())
        # One tensor, as a product gives them: backends must take rows with strides wider than the heads.
        width = form.heads * form.head_dim
        given = torch.randn((batch.rows, width + stored[0] * stored[1]), generator=generator).to(form.dtype)
        queries = given[:, :width].view(batch.rows, form.heads, form.head_dim)
        new = given[:, width:].view(batch.rows, *stored)
        tried.write(layer, new.to(device), plans[0])
        right.write(layer, new.float(), plans[1])
        found = tried.run_with_lse(layer, queries.to(device), plans[0])
        expected = right.run_with_lse(layer, queries.float(), plans[1])
        found = (tried.run(layer, queries.to(device), plans[0]), found[1])  # what serves is what is tried
        # Padding rows share a slot: the last write wins by chance on a GPU, and their results are unused.
        pairs = zip(found, expected, strict=True)
        worst = max(worst, *(_difference(each[:real], wanted[:real]) for each, wanted in pairs))
    return worst


def _plan_of(backend: AttentionBackend[Any], batch: Batch) -> Any:
    fixed = backend.plan_to_capture(batch) if isinstance(backend, Capturable) else None
    return backend.plan(batch) if fixed is None else fixed


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest one; what is no number is infinitely wrong."""
    return float(torch.nan_to_num((found.float().cpu() - expected).abs(), nan=torch.inf).max())


def random_batch(
    chance: random.Random, slots: int, asked: Sequence[RequestShape], scattered: bool = True
) -> Batch:
    """The requests with random trees, in scattered slots (but `in_order`), or one after the other."""
    first = sum(each.prefix for each in asked if each.in_order) if scattered else slots
    ordered = iter(range(first))
    free = iter(chance.sample(range(first, slots), slots - first)) if scattered else ordered
    return build_batch([_request(chance, each, free, ordered if each.in_order else free) for each in asked])


def _request(
    chance: random.Random, asked: RequestShape, free: Iterator[int], before: Iterator[int]
) -> RequestRows:
    """A chunk, or a random tree, each row below a random earlier one; the prefix in slots from `before`."""
    prefix = np.array([next(before) for _ in range(asked.prefix)], dtype=np.int32)
    own = [next(free) for _ in range(asked.rows)]
    ancestry, depths = [1], [0]
    for index in range(1, asked.rows):
        parent = index - 1
        if asked.depth:
            parent = chance.choice([row for row in range(index) if depths[row] < asked.depth])
        ancestry.append(ancestry[parent] | 1 << index)
        depths.append(depths[parent] + 1)
    return RequestRows(
        [0] * asked.rows, [asked.prefix + depth for depth in depths], own, prefix, [], ancestry
    )


_BATCH = (RequestShape(1024, 8),) * 8
"""Requests with trees behind prefixes of the usual length."""
_REPEATS = 5


def attention_seconds(make: Maker, layout: KVLayout, heads: int, device: str) -> float:
    """Seconds of a forward's attention in a model with this layout.

    Runs in memory of its own, some megabytes for each layer of another shape. Raises what the backend raises.
    """
    slots = sum(each.prefix + each.rows for each in _BATCH)
    kinds = tuple(dict.fromkeys(layout.layers))
    cache = KVCache(KVLayout(kinds, layout.dtype, order=layout_order(device)), slots, device)
    order = [kinds.index(layer) for layer in layout.layers]
    batch = random_batch(random.Random(0), slots, _BATCH)
    return forward_seconds(make(cache, heads), cache, heads, batch, order, device_clock(cache.device))


def forward_seconds(
    backend: AttentionBackend[Any],
    cache: KVCache,
    heads: int,
    batch: Batch,
    order: Sequence[int],
    now: Clock,
) -> float:
    """Seconds of a plan, and of attention in the cache's layers in this order: the least of some."""
    kinds = dict.fromkeys(cache.layout.layers)
    shape, device = (batch.rows, heads), cache.device
    queries = {
        kind: torch.zeros((*shape, kind.head_dim), dtype=backend.dtype, device=device) for kind in kinds
    }
    times: list[float] = []
    for _ in range(1 + _REPEATS):
        started = now()
        plan = backend.plan(batch)
        for layer in order:
            backend.run(layer, queries[cache.layout.layers[layer]], plan)
        times.append(now() - started)
    return min(times[1:])  # the first one may compile
