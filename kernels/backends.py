"""Which tree attention runs: the one that was asked for, or the fastest that proves right on this device.

A backend that fails its self-test is an error by name when it was asked for, and skipped with a warning under
`auto`. Knows the backends by how they are made; not how they compute.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ssd_serve.cache.kv import KVCache
from ssd_serve.errors import UserError
from ssd_serve.kernels.attention import AttentionBackend
from ssd_serve.kernels.checked import CheckedAttention, Difference
from ssd_serve.kernels.native.attention import NativeAttention
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.sdpa import SdpaAttention
from ssd_serve.kernels.self_test import Maker, first_failure
from ssd_serve.logs import Logger

if TYPE_CHECKING:
    from ssd_serve.kernels.flashinfer.adapter import Package

AUTO = "auto"
DEVICE_SCRATCH_BYTES = 384 << 20
"""Most memory of a GPU that any backend takes beside the cache, and what recorded forwards share."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that may run. `missing` says what it lacks here, and what to do about it; empty: nothing."""

    name: str
    missing: str
    make: Maker


@dataclass(frozen=True, slots=True)
class ChosenAttention:
    """The backend that runs, and its name."""

    name: str
    backend: AttentionBackend[Any]


@dataclass(frozen=True, slots=True)
class AttentionWish:
    """What is asked of the tree attention. `folder` keeps kernels that are compiled at their first use;
    `check` names a backend that recomputes some batches (empty: none), and `report` hears what differs."""

    backend: str = AUTO
    folder: Path = Path("~/.cache/ssd-serve")
    check: str = ""
    report: Callable[[Difference], None] | None = None


def attention_for(
    wish: AttentionWish, cache: KVCache, heads: int, native: NativeLibrary | None, log: Logger | None = None
) -> ChosenAttention:
    """The backend that serves, watched by another where that is wished. Raises `UserError`."""
    found = candidates(cache, native, wish.folder.expanduser(), log)
    chosen = choose_attention(wish.backend, cache, heads, found, log)
    if not wish.check or wish.report is None:
        return chosen
    second = choose_attention(wish.check, cache, heads, found).backend
    return ChosenAttention(chosen.name, CheckedAttention(chosen.backend, second, wish.report))


def candidates(
    cache: KVCache, native: NativeLibrary | None, folder: Path, log: Logger | None = None
) -> list[Candidate]:
    """All backends, the fastest first. `native` are the kernels compiled for this CPU; kernels that are
    compiled at the first use are kept in `folder`."""
    return [
        Candidate("native", _missing_native(cache, native), _native_maker(native)),
        Candidate("flashinfer", _missing_package(cache, "flashinfer"), _FlashInferMaker(folder, log)),
        Candidate("triton", _missing_package(cache, "triton"), _triton_maker),
        Candidate("sdpa", "", SdpaAttention),
    ]


def choose_attention(
    asked: str, cache: KVCache, heads: int, found: Sequence[Candidate], log: Logger | None = None
) -> ChosenAttention:
    """The backend named `asked`, or under `auto` the first of `found` that is there and right.

    Raises `UserError` when the one that was asked for cannot be used, or none can.
    """
    for each in found:
        if asked not in (AUTO, each.name) or (asked == AUTO and each.missing):
            continue
        wrong = each.missing or _failure(each, cache, heads)
        if not wrong:
            if log is not None:
                log.info("tree attention", backend=each.name)
            return ChosenAttention(each.name, each.make(cache, heads))
        if asked != AUTO:
            raise UserError(f"tree attention {each.name!r} cannot be used here: {wrong}")
        if log is not None:
            log.warning("tree attention skipped: wrong results", backend=each.name, reason=wrong)
    raise UserError(f"no tree attention passes its self-test here (asked for: {asked}); run `ssd doctor`")


def _failure(candidate: Candidate, cache: KVCache, heads: int) -> str:
    """What is wrong with its results for every shape of heads that this cache has."""
    layout = cache.layout
    device = str(cache.keys(0).device)
    shapes = sorted({(layer.heads, layer.head_dim) for layer in layout.layers})
    failures = (
        first_failure(candidate.make, layout.dtype, head_dim, device, ((heads, kv_heads),))
        for kv_heads, head_dim in shapes
    )
    wrong = next(filter(None, failures), "")
    return wrong and f"its self-test failed ({wrong}); use SSD_TREE_DECODE_BACKEND=auto or sdpa"


def _missing_native(cache: KVCache, native: NativeLibrary | None) -> str:
    shapes = {(layer.heads, layer.head_dim) for layer in cache.layout.layers}
    on_cpu = cache.keys(0).device.type == "cpu" and cache.layout.dtype is torch.float32
    if native is not None and on_cpu and len(shapes) == 1 and cache.layout.order == "heads":
        return ""
    return (
        "it needs a CPU, a C compiler on the PATH and SSD_NATIVE_KERNELS=true; "
        "use SSD_TREE_DECODE_BACKEND=auto or sdpa"
    )


def _missing_package(cache: KVCache, name: str) -> str:
    """Of a backend for GPUs."""
    if cache.keys(0).device.type == "cpu":
        return "it needs a GPU; use SSD_TREE_DECODE_BACKEND=auto, native or sdpa"
    if find_spec(name) is None:
        return f'it is not installed: pip install "ssd-serve[{name}]" on CUDA, ./setup_rocm.sh on ROCm'
    return ""


def _native_maker(native: NativeLibrary | None) -> Maker:
    def make(cache: KVCache, heads: int) -> AttentionBackend[Any]:
        if native is None:
            raise UserError("there are no compiled kernels")
        return NativeAttention(native, cache, heads)

    return make


class _FlashInferMaker:
    """Loads the package at the first use, and once: it reads its folder when it is imported."""

    def __init__(self, folder: Path, log: Logger | None) -> None:
        self._folder = folder
        self._log = log
        self._package: Package | None = None

    def __call__(self, cache: KVCache, heads: int) -> AttentionBackend[Any]:
        from ssd_serve.kernels.flashinfer.attention import FlashInferAttention
        from ssd_serve.kernels.flashinfer.loading import load_package
        from ssd_serve.kernels.flashinfer.page_size import fastest_page_size

        if self._package is None:
            self._package = load_package(cache.keys(0).device, self._folder / "flashinfer", self._log)
        page_size = fastest_page_size(cache, heads, self._package, self._log)
        return FlashInferAttention(cache, heads, self._package, page_size=page_size)


def _triton_maker(cache: KVCache, heads: int) -> AttentionBackend[Any]:
    from ssd_serve.kernels.triton.attention import TritonAttention

    return TritonAttention(cache, heads)
