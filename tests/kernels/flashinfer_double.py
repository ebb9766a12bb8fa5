"""Test doubles of FlashInfer's wrapper: attention in torch, computed only from the buffers.

They have the recorded signatures and the behaviour of the packages. AMD's port needs index buffers on the
device, and its masked scores are -50000. Logarithms are to base 2. A wrapper that had a mask must always have
one, also in graph mode. Buffers that kernels would read as garbage raise an error here. In graph mode a launch
reads the buffers at launch time, and goes through a `Device` that may record it.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, cast

import numpy as np
import torch

from ssd_serve.cache.kv import KVCache, KVLayout
from ssd_serve.kernels.flashinfer.adapter import MakeWrapper, Package, describe
from ssd_serve.kernels.flashinfer.attention import FlashInferAttention
from tests.kernels.flashinfer_buffers import (
    FIXED,
    INDICES,
    LAUNCHED,
    allowed_places,
    check_tensors,
    fixed_buffers,
    packed_mask,
    summary_of,
)
from tests.kernels.flashinfer_signatures import PORT, RESET, Recorded, signature

WORKSPACE = 64


class Device(Protocol):
    @property
    def capturing(self) -> bool: ...

    def launch(self, kernel: Callable[[], object]) -> None:
        """Run the kernel, and repeat it at every replay if it is recorded."""
        ...


class NoRecorder:
    """`Device` that records nothing."""

    capturing = False

    def launch(self, kernel: Callable[[], object]) -> None:
        """Run the kernel."""
        kernel()


class Doubles:
    """Test double of the wrapper's class, which keeps the wrappers that it made."""

    def __init__(self, recorded: Recorded, device: Device | None = None) -> None:
        self.recorded = recorded
        self.device = device or NoRecorder()
        self.made: list[WrapperDouble] = []
        self.plan = _signed(recorded.plan)

    def __call__(self, *positional: Any, **named: Any) -> "WrapperDouble":
        bound = signature(self.recorded.init).bind(None, *positional, **named)
        bound.apply_defaults()
        self.made.append(WrapperDouble(self.recorded, bound.arguments, self.device))
        return self.made[-1]

    def package(self) -> Package:
        """Return the adapter's description. Unlike kernels, the doubles compute any dtype and any head size."""
        package = describe(self.recorded.name, self.recorded.version, cast(MakeWrapper, self))
        dtypes = frozenset({torch.float32, torch.float16, torch.bfloat16})
        return replace(package, dtypes=dtypes, head_dims=frozenset(range(1, 257)))

    def attention(self, cache: KVCache, heads: int, page_size: int = 1) -> FlashInferAttention:
        """Return attention through doubles, over a copy of the cache with slots as the first dimension."""
        return FlashInferAttention(
            slots_first(cache), heads, self.package(), workspace_bytes=WORKSPACE, page_size=page_size
        )

    def planned(self, *, masked: bool) -> list[dict[str, Any]]:
        return [double.planned for double in self.made if (double.mask is not None) == masked]


class WrapperDouble:
    def __init__(self, recorded: Recorded, made_with: dict[str, Any], device: Device) -> None:
        if made_with["kv_layout"] != "NHD" or made_with["backend"] != "fa2":
            raise NotImplementedError("the double computes NHD pages as fa2 does")
        self._recorded = recorded
        self._port = recorded.name == PORT.name
        self._launches = device
        self._device = made_with["float_workspace_buffer"].device
        self._schedule = torch.zeros(8 * len(INDICES), dtype=torch.uint8)
        self.fixed: dict[str, torch.Tensor] | None = None
        if made_with["use_cuda_graph"]:
            self.fixed = fixed_buffers(made_with)
        self.planned: dict[str, Any] = {}
        self.plans = 0
        self.mask: torch.Tensor | None = None

    def reset_workspace_buffer(self, *positional: Any, **named: Any) -> None:
        """Use this workspace for schedules."""
        bound = signature(RESET).bind(self, *positional, **named)
        self._schedule = bound.arguments["int_workspace_buffer"]
        if self._schedule.dtype != torch.uint8 or self._schedule.device != self._device:
            raise TypeError("the workspace must be uint8, and on the device")

    def plan(self, *positional: Any, **named: Any) -> None:
        """Keep a copy of all buffers, or fill the fixed ones."""
        if self._launches.capturing:
            raise RuntimeError("planning waits for the device and cannot be captured")
        bound = signature(self._recorded.plan).bind(self, *positional, **named)
        for name in self._recorded.refused:
            if name in bound.arguments:
                raise NotImplementedError(f"{name} is not supported on ROCm")
        bound.apply_defaults()
        planned = {name: _copied(value) for name, value in bound.arguments.items() if name != "self"}
        self._check_plan(planned)
        if self.fixed is not None:
            self._fill(self.fixed, planned)
        self.planned, self.mask = planned, planned["custom_mask"]
        self.plans += 1
        summary = summary_of(*(planned[name] for name in INDICES)).view(torch.uint8)
        self._schedule[: len(summary)].copy_(summary)

    def run(self, *positional: Any, **named: Any) -> Any:
        """Compute attention as planned."""
        if self._launches.capturing and self.fixed is None:
            raise RuntimeError("only a wrapper in graph mode can be recorded")
        bound = signature(self._recorded.run).bind(self, *positional, **named)
        bound.apply_defaults()
        queries, planned = bound.arguments["q"], self.planned
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        lse = torch.empty(queries.shape[:2], device=queries.device)

        def kernel() -> None:
            result, sums = self._attend(planned, queries, *bound.arguments["paged_kv_cache"])
            out.copy_(result)
            lse.copy_(sums)

        self._launches.launch(kernel)
        return (out, lse) if bound.arguments["return_lse"] else out

    def run_return_lse(self, *positional: Any, **named: Any) -> Any:
        """Compute planned attention, and return logarithms to base 2."""
        return self.run(*positional, **named, return_lse=True)

    def _check_plan(self, planned: dict[str, Any]) -> None:
        if planned["packed_custom_mask"] is not None:
            raise NotImplementedError("packed masks are read at wrong offsets")
        for name in INDICES:
            if planned[name].dtype != torch.int32 or planned[name].ndim != 1:
                raise TypeError(f"{name} must be int32 and flat")
            if self._port and planned[name].device != self._device:
                raise RuntimeError(f"{name} must be on {self._device}")
        mask = planned["custom_mask"]
        if mask is None and (self.mask is not None or "custom_mask_buf" in (self.fixed or {})):
            raise RuntimeError("a wrapper that had a mask stays in that mode")
        if mask is not None and (mask.dtype != torch.bool or mask.ndim != 1 or mask.device != self._device):
            raise TypeError("the mask must be bool, flat, and on the device")

    def _fill(self, fixed: dict[str, torch.Tensor], planned: dict[str, Any]) -> None:
        requests = len(planned["qo_indptr"]) - 1
        if requests != len(fixed["qo_indptr_buf"]) - 1:
            raise ValueError(f"the buffers are not made for {requests} requests")
        for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk", *LAUNCHED):
            if self.planned and planned[name] != self.planned[name]:
                raise ValueError(f"{name} was told to launches that may be recorded")
        if planned.get("fixed_split_size") is not None:
            raise RuntimeError("fixed splits need more work than what is recorded launches")
        rows = int(planned["qo_indptr"][-1])
        if self.planned and rows > int(self.planned["qo_indptr"][-1]):
            raise ValueError("the number of rows exceeds that of the first plan")
        buffers = dict(zip(INDICES, (fixed[name] for name in FIXED), strict=True))
        mask = planned["custom_mask"]
        if mask is not None:
            if "custom_mask_buf" not in fixed:
                raise ValueError("custom_mask_buf must be given in graph mode")
            bits, offsets = packed_mask(planned)
            planned = planned | {"bits": bits, "offsets": offsets}
            buffers |= {"bits": fixed["custom_mask_buf"], "offsets": fixed["mask_indptr_buf"]}
        for name, buffer in buffers.items():
            given = planned[name]
            whole = name not in ("paged_kv_indices", "bits")
            if len(given) != len(buffer) if whole else len(given) > len(buffer):
                raise ValueError(f"{name} has {len(given)} entries, its fixed buffer {len(buffer)}")
            buffer[: len(given)].copy_(given)

    def _attend(
        self, planned: dict[str, Any], queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Computed on the CPU, on any device of the tensors.
        found = (planned[name] if self.fixed is None else self.fixed[name] for name in self._names())
        indices = [each.cpu() for each in found]
        queries, keys, values = queries.cpu(), keys.cpu(), values.cpu()
        used = int(indices[1][-1])
        summary = summary_of(indices[0], indices[1], indices[2][:used], indices[3]).view(torch.uint8)
        if not torch.equal(self._schedule[: len(summary)].cpu(), summary):
            raise RuntimeError("what is scheduled is not what the buffers say: plan again")
        check_tensors(planned, queries, keys, values)
        (rows, pages), lengths = (each.tolist() for each in indices[:2]), indices[3].tolist()
        page_size, masks_read = planned["page_size"], 0
        outs: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        for request, last in enumerate(lengths):
            own = indices[2][pages[request] : pages[request + 1]].long()
            context = (len(own) - 1) * page_size + last
            count = rows[request + 1] - rows[request]
            if count == 0:
                continue
            seen = self._seen(planned, request, masks_read, count * context)
            allowed = allowed_places(planned, count, context, seen)
            masks_read += count * context
            k, v = (pool[own].flatten(0, 1)[:context].float() for pool in (keys, values))
            out, lse = self._softmax(
                planned, queries[rows[request] : rows[request + 1]].float(), k, v, allowed
            )
            outs.append(out)
            sums.append(lse)
        if self.fixed is None and self.mask is not None and masks_read != len(self.mask):
            raise ValueError(f"the mask has {len(self.mask)} entries, rows and contexts {masks_read}")
        return torch.cat(outs).to(queries.dtype), torch.cat(sums)

    def _names(self) -> tuple[str, ...]:
        return INDICES if self.fixed is None else FIXED

    def _seen(self, planned: dict[str, Any], request: int, start: int, size: int) -> torch.Tensor | None:
        """Return a request's part of the mask, flat."""
        if self.fixed is None:
            mask = planned["custom_mask"]
            return None if mask is None else mask[start : start + size].cpu()
        if "custom_mask_buf" not in self.fixed:
            return None
        first = int(self.fixed["mask_indptr_buf"][request])
        packed = self.fixed["custom_mask_buf"][first : first + -(-size // 8)].cpu().numpy()
        return torch.from_numpy(np.unpackbits(packed, bitorder="little")[:size].astype(np.bool_))

    def _softmax(
        self,
        planned: dict[str, Any],
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        allowed: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs [count, heads, head_dim] and log-sums [count, heads] of one request."""
        group = queries.shape[1] // keys.shape[1]
        keys, values = (rows.repeat_interleave(group, dim=1) for rows in (keys, values))
        scores = torch.einsum("qhd,chd->qhc", queries, keys)
        scores = scores.masked_fill(~allowed[:, None], -5e4 if self._port else -math.inf)
        scale = planned["sm_scale"]
        scores = scores * (queries.shape[2] ** -0.5 if scale is None else scale)
        out = torch.einsum("qhc,chd->qhd", torch.softmax(scores, 2), values)
        return out, torch.logsumexp(scores, 2) / math.log(2.0)


def slots_first(cache: KVCache) -> KVCache:
    """Return a copy of a cache in the memory order that pages need."""
    layout = cache.layout
    copy = KVCache(KVLayout(layout.layers, layout.dtype, order="slots"), cache.slots, str(cache.device))
    for layer in range(len(layout.layers)):
        rows = torch.cat((cache.keys(layer), cache.values(layer))).transpose(0, 1)
        copy.write(layer, torch.arange(cache.slots), rows)
    return copy


def _signed(text: str) -> Any:
    """Return a function with this signature."""

    def signed() -> None:
        raise NotImplementedError("made to be looked at")

    cast(Any, signed).__signature__ = signature(text)
    return signed


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
