"""The one place that knows FlashInfer: upstream's package, AMD's port, and how they differ.

Both are imported as `flashinfer`: `flashinfer-python` is for CUDA, `amd-flashinfer` for ROCm. Their
signatures are recorded in the tests of this module: upstream 0.7.2.post1, the port 0.5.3+amd.2, and the
port's main branch at 05005763. Which package to use, and where it compiles kernels, is in `installation.py`.

Upstream's kernels have run on an H100, the port's never: its Python was read, and its signatures are tested
against. Knows no batch and no model.
"""

import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from ssd_serve.base.errors import UserError
from ssd_serve.cache.kv import LayerKV
from ssd_serve.kernels.batch import Int32Array
from ssd_serve.kernels.flashinfer.installation import PORT

_PLAN_ARGUMENTS = frozenset(
    {"causal", "custom_mask", "sm_scale", "window_left", "q_data_type", "kv_data_type"}
)
"""The named arguments that are always sent; both packages have them, and more that only one of them has."""


class Wrapper(Protocol):
    """Methods of both packages' `BatchPrefillWithPagedKVCacheWrapper` that are used here."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **named: Any,
    ) -> None:
        """Schedule one forward's work; waits for the device."""
        ...

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Use these from the next plan on; the second holds what plans schedule."""
        ...

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Attend: [rows, heads, head_dim] -> [rows, heads, head_dim]."""
        ...

    def run_return_lse(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend, and return the base-2 logarithm of the sum of weights: float32 [rows, heads]."""
        ...


MakeWrapper = Callable[..., Wrapper]
"""The wrapper's class: called with the workspace, the layout of pages and named arguments."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Index tables of a plan on the host: the pages to which rows attend."""

    query_offsets: Int32Array  # [requests + 1]
    page_offsets: Int32Array  # [requests + 1]
    pages: Int32Array  # [sum of page counts]
    last_page_lengths: Int32Array  # [requests]
    mask: npt.NDArray[np.bool_] | None
    """Flat, a request's [rows, context] after another's, true where a row attends."""
    causal: bool = False
    """True if rows are the newest of their context, and see what is before them; else, where there is no
    mask, they see all of it."""
    page_size: int = 1


@dataclass(frozen=True, slots=True)
class FixedBuffers:
    """Device buffers of the plan of a wrapper that can be captured; int32 unless noted.

    Its number of requests never changes, nor whether it has a mask.
    """

    query_offsets: torch.Tensor  # [requests + 1]
    page_offsets: torch.Tensor  # [requests + 1]
    pages: torch.Tensor  # [as many as a plan may have]
    last_page_lengths: torch.Tensor  # [requests]
    schedule: torch.Tensor
    """uint8: how the work is split. 13 bytes for each tile of rows and piece of context that a GPU computes
    at a time, and 4 for each row and request."""
    mask: torch.Tensor | None
    """uint8, bits; each request's begin at a byte of their own. None: without a mask."""
    mask_offsets: torch.Tensor | None  # [requests + 1]

    def first(self, requests: int, *, masked: bool) -> "FixedBuffers":
        """The same memory for fewer requests. FlashInfer masks wherever it is given a buffer for masks."""
        offsets = self.mask_offsets
        return replace(
            self,
            query_offsets=self.query_offsets[: requests + 1],
            page_offsets=self.page_offsets[: requests + 1],
            last_page_lengths=self.last_page_lengths[:requests],
            mask=self.mask if masked else None,
            mask_offsets=offsets[: requests + 1] if masked and offsets is not None else None,
        )


@dataclass(frozen=True, slots=True)
class Package:
    """An installed FlashInfer, and what is peculiar to it."""

    name: str
    version: str
    make: MakeWrapper
    indices_on_device: bool
    """True if `plan` wants index buffers on the GPU already. The port computes the offsets of packed masks
    from them there (so do all versions read); upstream 0.7.2.post1 reads them on the host, and moves them."""
    can_fix_splits: bool
    """True if `plan` takes `fixed_split_size`. The port 0.5.3+amd.2 lacks it (and `o_data_type`,
    `disable_split_kv`, `uniform_q_len`, and `lse_base` of `run`); its main branch names three of them, and
    refuses any value but the default. So none is ever sent to the port."""
    dtypes: frozenset[torch.dtype] = frozenset({torch.float16, torch.bfloat16})
    head_dims: frozenset[int] = frozenset({64, 128, 256})

    def wrapper(self, workspace: torch.Tensor) -> Wrapper:
        """A wrapper for keys and values in NHD order.

        The backend is named because others ignore masks (AITER on ROCm) or reject them (FA3), and what
        `auto` chooses changes between versions.
        """
        return self.make(workspace, "NHD", backend="fa2")

    def capturable_wrapper(self, workspace: torch.Tensor, buffers: FixedBuffers) -> Wrapper:
        """Return a wrapper that reads its indices only from these buffers, which `plan` fills.

        Its first plan fixes the maximum number of rows. All its plans must agree in heads, causality, window
        and page size, because launches fix these.
        """
        wrapper = self.make(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=buffers.query_offsets,
            paged_kv_indptr_buf=buffers.page_offsets,
            paged_kv_indices_buf=buffers.pages,
            paged_kv_last_page_len_buf=buffers.last_page_lengths,
            custom_mask_buf=buffers.mask,
            mask_indptr_buf=buffers.mask_offsets,
            backend="fa2",
        )
        # A wrapper makes a schedule of 8 MiB for itself, and copies it from pinned memory of the same size.
        wrapper.reset_workspace_buffer(workspace, buffers.schedule)
        return wrapper

    def plan(
        self,
        wrapper: Wrapper,
        tables: Tables,
        *,
        heads: int,
        layer: LayerKV,
        dtype: torch.dtype,
        device: torch.device,
        split_pages: int | None,
    ) -> None:
        """Plan one forward of all layers like `layer`.

        A mask holds ancestry and window; causal rows see a window. Every row must see something. The port
        weighs masked scores with -50000 instead of minus infinity, so that a row that saw nothing would get
        an average of foreign values (upstream 0.7.2.post1 has minus infinity).
        """
        place = device if self.indices_on_device else torch.device("cpu")
        named: dict[str, Any] = {
            "causal": tables.causal,
            # The bools, not packed bits: packed ones are read at wrong offsets where there are several
            # requests. That is so until flashinfer's pull request 2201 is in both packages.
            "custom_mask": None if tables.mask is None else torch.from_numpy(tables.mask).to(device),
            "sm_scale": layer.scale,
            "window_left": layer.window - 1 if tables.causal and layer.window is not None else -1,
            "q_data_type": dtype,  # the default is float16, even if run gets another dtype
            "kv_data_type": dtype,
        }
        if split_pages is not None:
            named["fixed_split_size"] = split_pages
        wrapper.plan(
            torch.from_numpy(tables.query_offsets).to(place),
            torch.from_numpy(tables.page_offsets).to(place),
            torch.from_numpy(tables.pages).to(place),
            torch.from_numpy(tables.last_page_lengths).to(place),
            heads,
            layer.heads,
            layer.head_dim,
            tables.page_size,
            **named,
        )


def natural(lse: torch.Tensor) -> torch.Tensor:
    """Logarithms to base 2 as natural ones. (Upstream 0.7.2.post1 could give them; the port cannot yet.)"""
    return lse * math.log(2.0)


def describe(name: str, version: str, make: MakeWrapper) -> Package:
    """Describe a package with this wrapper. Raises UserError where it lacks an argument that is needed."""
    known = inspect.signature(cast(Any, make).plan).parameters
    missing = sorted(_PLAN_ARGUMENTS - known.keys())
    if missing:
        raise UserError(
            f"{name} {version} cannot plan attention as it is needed here (no {', '.join(missing)}): "
            "install flashinfer-python 0.7.2.post1 or amd-flashinfer 0.5.3+amd.2, or use another backend"
        )
    port = name == PORT
    return Package(
        name=name,
        version=version,
        make=make,
        indices_on_device=port,
        can_fix_splits=not port and "fixed_split_size" in known,
    )


def import_package(name: str, version: str) -> Package:
    """Import what `choose` chose. The folder for compiled kernels must be chosen before.

    Raises UserError where the import fails, for example for want of the package's own dependencies.
    """
    try:
        module = importlib.import_module("flashinfer")
    except (ImportError, RuntimeError, OSError) as error:
        raise UserError(
            f"{name} {version} is installed but cannot be imported: {error}; install it with its dependencies"
        ) from error
    return describe(name, version, cast(MakeWrapper, module.BatchPrefillWithPagedKVCacheWrapper))
