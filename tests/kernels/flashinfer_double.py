"""Doubles of FlashInfer's wrapper: attention in torch, computed from nothing but the buffers they are given.

They have the recorded signatures and the habits of the packages: index buffers of the port are on the device
already, its masked scores are -50000, logarithms are to base 2, and a wrapper that once had a mask never
works without one (so it is in graph mode). What kernels would read as garbage raises here. They capture no
graphs.
"""

import math
from dataclasses import replace
from typing import Any, cast

import torch

from ssd_serve.cache.kv import KVCache, KVLayout
from ssd_serve.kernels.flashinfer.adapter import MakeWrapper, Package, describe
from ssd_serve.kernels.flashinfer.attention import FlashInferAttention
from tests.kernels.flashinfer_signatures import PORT, Recorded, signature

INDICES = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
WORKSPACE = 64


class Doubles:
    """Stands in for the wrapper's class, and keeps what it made."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self.made: list[WrapperDouble] = []
        self.plan = _signed(recorded.plan)

    def __call__(self, *positional: Any, **named: Any) -> "WrapperDouble":
        bound = signature(self.recorded.init).bind(None, *positional, **named)
        bound.apply_defaults()
        self.made.append(WrapperDouble(self.recorded, bound.arguments))
        return self.made[-1]

    def package(self) -> Package:
        """The adapter's view of it. Unlike kernels, the doubles compute any dtype and any size of head."""
        package = describe(self.recorded.name, self.recorded.version, cast(MakeWrapper, self))
        dtypes = frozenset({torch.float32, torch.float16, torch.bfloat16})
        return replace(package, dtypes=dtypes, head_dims=frozenset(range(1, 257)))

    def attention(self, cache: KVCache, heads: int, page_size: int = 1) -> FlashInferAttention:
        """Attention through doubles, over a copy of the cache in which slots come first."""
        return FlashInferAttention(
            slots_first(cache), heads, self.package(), workspace_bytes=WORKSPACE, page_size=page_size
        )

    def planned(self, *, masked: bool) -> list[dict[str, Any]]:
        """What the wrappers with a mask, or those without, were last planned with."""
        return [double.planned for double in self.made if (double.mask is not None) == masked]


class WrapperDouble:
    """One wrapper."""

    def __init__(self, recorded: Recorded, made_with: dict[str, Any]) -> None:
        if made_with["kv_layout"] != "NHD" or made_with["backend"] != "fa2" or made_with["use_cuda_graph"]:
            raise NotImplementedError("the double computes NHD pages as fa2 does, without graphs")
        self._recorded = recorded
        self._port = recorded.name == PORT.name
        self._device = made_with["float_workspace_buffer"].device
        self.planned: dict[str, Any] = {}
        self.plans = 0
        self.mask: torch.Tensor | None = None

    def plan(self, *positional: Any, **named: Any) -> None:
        """Keep a copy of all buffers."""
        bound = signature(self._recorded.plan).bind(self, *positional, **named)
        for name in self._recorded.refused:
            if name in bound.arguments:
                raise NotImplementedError(f"{name} is not supported on ROCm")
        bound.apply_defaults()
        planned = {name: _copied(value) for name, value in bound.arguments.items() if name != "self"}
        if planned["packed_custom_mask"] is not None:
            raise NotImplementedError("packed masks are read at wrong offsets")
        for name in INDICES:
            if planned[name].dtype != torch.int32 or planned[name].ndim != 1:
                raise TypeError(f"{name} must be int32 and flat")
            if self._port and planned[name].device != self._device:
                raise RuntimeError(f"{name} must be on {self._device}")
        mask = planned["custom_mask"]
        if mask is None and self.mask is not None:
            raise RuntimeError("a wrapper that had a mask stays in that mode")
        if mask is not None and (mask.dtype != torch.bool or mask.ndim != 1 or mask.device != self._device):
            raise TypeError("the mask must be bool, flat, and on the device")
        self.planned, self.mask = planned, mask
        self.plans += 1

    def run(self, *positional: Any, **named: Any) -> Any:
        """Attend as planned."""
        bound = signature(self._recorded.run).bind(self, *positional, **named)
        bound.apply_defaults()
        out, lse = self._attend(bound.arguments["q"], *bound.arguments["paged_kv_cache"])
        return (out, lse) if bound.arguments["return_lse"] else out

    def run_return_lse(self, *positional: Any, **named: Any) -> Any:
        """Attend as planned, with logarithms to base 2."""
        return self.run(*positional, **named, return_lse=True)

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._check(queries, keys, values)
        rows, pages = (self.planned[name].tolist() for name in INDICES[:2])
        lengths = self.planned["paged_kv_last_page_len"].tolist()
        page_size, masks_read = self.planned["page_size"], 0
        outs: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        for request, last in enumerate(lengths):
            indices = self.planned["paged_kv_indices"][pages[request] : pages[request + 1]].long()
            context = (len(indices) - 1) * page_size + last
            count = rows[request + 1] - rows[request]
            allowed = self._allowed(count, context, masks_read)
            masks_read += count * context
            k, v = (pool[indices].flatten(0, 1)[:context].float() for pool in (keys, values))
            out, lse = self._softmax(queries[rows[request] : rows[request + 1]].float(), k, v, allowed)
            outs.append(out)
            sums.append(lse)
        if self.mask is not None and masks_read != len(self.mask):
            raise ValueError(f"the mask has {len(self.mask)} entries, rows and contexts {masks_read}")
        return torch.cat(outs).to(queries.dtype), torch.cat(sums)

    def _allowed(self, count: int, context: int, masks_read: int) -> torch.Tensor:
        """Which of the context each of a request's rows sees: [count, context]."""
        window = self.planned["window_left"]
        own = torch.arange(context - count, context)[:, None]  # a row's place in the context, if it is causal
        places = torch.arange(context)[None, :]
        allowed = torch.ones((count, context), dtype=torch.bool)
        if self.mask is not None:  # causal is ignored then
            allowed = self.mask[masks_read : masks_read + count * context].reshape(count, context)
        elif self.planned["causal"]:
            allowed = places <= own
        if window >= 0:
            allowed = allowed & (places >= own - window)
        if not allowed.any(dim=1).all():
            raise ValueError("a row sees nothing: kernels would return an average of foreign values")
        return allowed

    def _softmax(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, allowed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[count, heads, head_dim] and [count, heads] of one request."""
        group = queries.shape[1] // keys.shape[1]
        keys, values = (rows.repeat_interleave(group, dim=1) for rows in (keys, values))
        scores = torch.einsum("qhd,chd->qhc", queries, keys)
        scores = scores.masked_fill(~allowed[:, None], -5e4 if self._port else -math.inf)
        scale = self.planned["sm_scale"]
        scores = scores * (queries.shape[2] ** -0.5 if scale is None else scale)
        out = torch.einsum("qhc,chd->qhd", torch.softmax(scores, 2), values)
        return out, torch.logsumexp(scores, 2) / math.log(2.0)

    def _check(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """What kernels assume, and do not all check."""
        planned = self.planned
        kv_dtype = planned["kv_data_type"] or planned["q_data_type"]
        if queries.dtype != planned["q_data_type"] or keys.dtype != kv_dtype or values.dtype != kv_dtype:
            raise TypeError("dtypes are not those that were planned")
        if queries.shape != (planned["qo_indptr"][-1], planned["num_qo_heads"], planned["head_dim_qk"]):
            raise ValueError(f"queries {tuple(queries.shape)} are not those that were planned")
        if keys.shape[1:] != (planned["page_size"], planned["num_kv_heads"], planned["head_dim_qk"]):
            raise ValueError(f"pages {tuple(keys.shape)} are not those that were planned")
        if keys.shape != values.shape or keys.stride() != values.stride():
            raise ValueError("keys and values must have the same strides")
        if queries.stride(-1) != 1 or keys.stride(-1) != 1:
            raise ValueError("a head must lie in one piece")


def slots_first(cache: KVCache) -> KVCache:
    """A copy of a cache, in the order of memory that pages need."""
    layout = cache.layout
    copy = KVCache(
        KVLayout(layout.layers, layout.dtype, order="slots"), cache.slots, str(cache.keys(0).device)
    )
    for layer in range(len(layout.layers)):
        rows = torch.cat((cache.keys(layer), cache.values(layer))).transpose(0, 1)
        copy.write(layer, torch.arange(cache.slots), rows)
    return copy


def _signed(text: str) -> Any:
    """Something callable with this signature."""

    def signed() -> None:
        raise NotImplementedError("made to be looked at")

    cast(Any, signed).__signature__ = signature(text)
    return signed


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
