"""Requirements of FlashInfer's kernels on index buffers, masks and tensors, for their doubles."""

from typing import Any

import numpy as np
import torch

INDICES = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
FIXED = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
LAUNCHED = ("page_size", "causal", "window_left", "sm_scale", "q_data_type", "kv_data_type")
"""Arguments that are fixed in a captured launch."""


def fixed_buffers(made_with: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the buffers of a wrapper in graph mode after checks of their types and sizes."""
    names: tuple[str, ...] = FIXED
    if made_with["custom_mask_buf"] is not None or made_with["mask_indptr_buf"] is not None:
        names = (*FIXED, "custom_mask_buf", "mask_indptr_buf")
    fixed = {name: made_with[name] for name in names}
    for name, buffer in fixed.items():
        dtype = torch.uint8 if name == "custom_mask_buf" else torch.int32
        if not isinstance(buffer, torch.Tensor):
            raise ValueError(f"{name} must be a tensor in graph mode")
        if (
            buffer.dtype != dtype
            or buffer.ndim != 1
            or buffer.device != made_with["float_workspace_buffer"].device
        ):
            raise TypeError(f"{name} must be {dtype}, flat, and on the device")
    requests = len(fixed["qo_indptr_buf"]) - 1
    for name, size in (("paged_kv_indptr_buf", 1), ("paged_kv_last_page_len_buf", 0), ("mask_indptr_buf", 1)):
        if name in fixed and len(fixed[name]) != requests + size:
            raise ValueError(f"{name} is not made for {requests} requests")
    return fixed


def packed_mask(planned: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mask packed to bits, and the byte at which each request's part begins."""
    rows, pages, lengths = (planned[name].long() for name in (INDICES[0], INDICES[1], INDICES[3]))
    sizes = rows.diff() * ((pages.diff() - 1) * planned["page_size"] + lengths)
    pieces = planned["custom_mask"].split(sizes.tolist())
    packed = [torch.from_numpy(np.packbits(piece.cpu().numpy(), bitorder="little")) for piece in pieces]
    offsets = torch.tensor([0, *(len(piece) for piece in packed)]).cumsum(0)
    return torch.cat(packed), offsets.int()


def summary_of(
    rows: torch.Tensor, pages: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Return a substitute for a schedule, which depends on the requests: int64 [4]."""
    if rows.device.type == "meta":
        return torch.zeros(len(INDICES), dtype=torch.int64)
    rows, pages, indices, lengths = rows.cpu(), pages.cpu(), indices.cpu(), lengths.cpu()
    weights = torch.arange(1, len(rows) + 1)
    return torch.stack(
        [
            torch.tensor(len(rows)),
            (rows * weights).sum(),
            (pages * weights).sum(),
            indices.sum() + lengths.sum(),
        ]
    )


def allowed_places(
    planned: dict[str, Any], count: int, context: int, seen: torch.Tensor | None
) -> torch.Tensor:
    window = planned["window_left"]
    own = torch.arange(context - count, context)[:, None]  # a row's position in the context, if causal
    places = torch.arange(context)[None, :]
    allowed = torch.ones((count, context), dtype=torch.bool)
    if seen is not None:  # causal is ignored then
        allowed = seen.reshape(count, context)
    elif planned["causal"]:
        allowed = places <= own
    if window >= 0:
        allowed = allowed & (places >= own - window)
    if not allowed.any(dim=1).all():
        raise ValueError("a row sees nothing: kernels would return an average of foreign values")
    return allowed


def check_tensors(
    planned: dict[str, Any], queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
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
