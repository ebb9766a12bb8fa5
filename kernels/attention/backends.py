"""Which tree attention runs: the one that was asked for, or the fastest that proves right on this device.

A backend that fails its self-test is an error by name when it was asked for, and skipped with a warning under
`auto`. Knows the backends by how they are made; not how they compute.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ssd_serve.cache.kv import KVCache
from ssd_serve.errors import UserError, in_a_line
from ssd_serve.kernels.attention.checked import CheckedAttention, Difference
from ssd_serve.kernels.attention.contract import AttentionBackend
from ssd_serve.kernels.attention.invariance import depends_on_batch
from ssd_serve.kernels.attention.sdpa import SdpaAttention
from ssd_serve.kernels.attention.sdpa_rows import SdpaRows
from ssd_serve.kernels.attention.self_test import Heads, Maker, first_failure
from ssd_serve.kernels.attention.timing import attention_seconds
from ssd_serve.kernels.attention.unrolled import UnrolledAttention
from ssd_serve.kernels.native.attention import NativeAttention
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.logs import Logger
from ssd_serve.owned import cache_folder

if TYPE_CHECKING:
    from ssd_serve.kernels.flashinfer.adapter import Package

AUTO = "auto"
NAMES = ("native", "flashinfer", "triton", "sdpa")
DEVICE_SCRATCH_BYTES = 1536 << 20
"""Of a GPU's memory: what a backend takes beside the cache, what recorded forwards share, and the logits of a
large batch while tokens are chosen from them."""
_SPLIT_PAGES = 512
"""Where FlashInfer splits contexts so that results do not depend on the batch."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that may run. `missing` says what it lacks here, and what to do about it; empty: nothing.
    `invariant`: its results must not depend on the batch."""

    name: str
    missing: str
    make: Maker
    invariant: bool = False


@dataclass(frozen=True, slots=True)
class ChosenAttention:
    """The backend that runs, and its name."""

    name: str
    backend: AttentionBackend[Any]


@dataclass(frozen=True, slots=True)
class AttentionWish:
    """What is asked of the tree attention. `folder` keeps kernels that are compiled at their first use;
    `check` names a backend that recomputes some batches (empty: none), and `report` hears what differs.
    `invariant`: a row's result must be the same to the bit in any batch, tree or chunk. `measured`: on GPUs
    the fastest is found by measuring; else it is the first, the same on equal devices."""

    backend: str = AUTO
    folder: Path = Path("~/.cache/ssd-serve")
    check: str = ""
    report: Callable[[Difference], None] | None = None
    invariant: bool = False
    measured: bool = True


def attention_for(
    wish: AttentionWish, cache: KVCache, heads: int, native: NativeLibrary | None, log: Logger | None = None
) -> ChosenAttention:
    """The backend that serves, watched by another where that is wished. Raises `UserError`."""
    folder = cache_folder(wish.folder, log.warning if log is not None else lambda _line: None)
    found = candidates(cache, native, folder, log, invariant=wish.invariant)
    device = cache.keys(0).device

    def seconds(make: Maker) -> float:
        return attention_seconds(make, cache.layout, heads, str(device))

    measure = seconds if wish.measured and device.type != "cpu" else None  # on CPUs the order is known
    chosen = choose_attention(wish.backend, cache, heads, found, log, measure)
    if not wish.check or wish.report is None:
        return chosen
    second = choose_attention(wish.check, cache, heads, candidates(cache, native, folder)).backend
    return ChosenAttention(chosen.name, CheckedAttention(chosen.backend, second, wish.report))


def candidates(
    cache: KVCache,
    native: NativeLibrary | None,
    folder: Path,
    log: Logger | None = None,
    *,
    invariant: bool = False,
) -> list[Candidate]:
    """All backends, the fastest first. `native` are the kernels compiled for this CPU; kernels that are
    compiled at the first use are kept in `folder`. `invariant`: a row's result does not depend on its
    batch; the compiled kernel's never does."""
    flashinfer = _FlashInferMaker(folder, log, _SPLIT_PAGES if invariant else None)
    makers: dict[str, Maker] = {"flashinfer": flashinfer, "triton": _triton_maker, "sdpa": SdpaAttention}
    if invariant:
        makers["sdpa"] = SdpaRows
        makers = {name: _unrolling(make) for name, make in makers.items()}
    missing = {name: _missing_package(cache, name) for name in ("flashinfer", "triton")}
    return [
        Candidate("native", _missing_native(cache, native), _native_maker(native), invariant),
        *(Candidate(name, missing.get(name, ""), make, invariant) for name, make in makers.items()),
    ]


def choose_attention(
    asked: str,
    cache: KVCache,
    heads: int,
    found: Sequence[Candidate],
    log: Logger | None = None,
    seconds: Callable[[Maker], float] | None = None,
) -> ChosenAttention:
    """The backend named `asked`, or under `auto` the fastest of `found` that is there and right.

    `seconds` measures one; without it the first is the fastest. Raises `UserError` when the one that was
    asked for cannot be used, or none can.
    """
    right = _right(asked, cache, heads, found, log)
    if asked != AUTO or seconds is None:
        return _chosen(next(right, None), asked, cache, heads, log)
    times = {each: taken for each in right if (taken := _measured(each, seconds, log)) is not None}
    fastest = min(times, key=times.__getitem__, default=None)
    microseconds = {each.name: round(1e6 * taken) for each, taken in times.items()}
    return _chosen(fastest, asked, cache, heads, log, **microseconds)


def _chosen(
    candidate: Candidate | None,
    asked: str,
    cache: KVCache,
    heads: int,
    log: Logger | None,
    **microseconds: int,
) -> ChosenAttention:
    if candidate is None:
        raise UserError(f"no tree attention passes its self-test here (asked for: {asked}); run `ssd doctor`")
    if log is not None:
        told = {f"{name}_us": taken for name, taken in microseconds.items()}
        log.info("tree attention", backend=candidate.name, **told)
    return ChosenAttention(candidate.name, candidate.make(cache, heads))


def _right(
    asked: str, cache: KVCache, heads: int, found: Sequence[Candidate], log: Logger | None
) -> Iterator[Candidate]:
    """Those that were asked for, are there and pass their self-test, which the others are told not to."""
    for each in found:
        if asked not in (AUTO, each.name) or (asked == AUTO and each.missing):
            continue
        wrong = each.missing or _failure(each, cache, heads)
        if not wrong:
            yield each
        elif asked != AUTO:
            raise UserError(f"tree attention {each.name!r} cannot be used here: {wrong}")
        elif log is not None:
            log.warning("tree attention skipped: wrong results", backend=each.name, reason=wrong)


def _measured(candidate: Candidate, seconds: Callable[[Maker], float], log: Logger | None) -> float | None:
    try:
        return seconds(candidate.make)
    except Exception as error:  # whatever a foreign kernel or its compiler raises
        if log is not None:
            reason = in_a_line(error)
            log.warning("tree attention skipped: it cannot be timed", backend=candidate.name, reason=reason)
        return None


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
    forms = (Heads(heads, kv_heads, head_dim, layout.dtype) for kv_heads, head_dim in shapes)
    if not wrong and candidate.invariant:
        depending = (form for form in forms if depends_on_batch(candidate.make, form, device))
        wrong = next((f"{form}: a row's result depends on its batch" for form in depending), "")
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

    def __init__(self, folder: Path, log: Logger | None, split_pages: int | None = None) -> None:
        self._folder = folder
        self._log = log
        self._split_pages = split_pages
        self._package: Package | None = None

    def __call__(self, cache: KVCache, heads: int) -> AttentionBackend[Any]:
        from ssd_serve.kernels.flashinfer.attention import FlashInferAttention
        from ssd_serve.kernels.flashinfer.loading import load_package
        from ssd_serve.kernels.flashinfer.page_size import fastest_page_size

        if self._package is None:
            self._package = load_package(cache.keys(0).device, self._folder / "flashinfer", self._log)
        if self._split_pages is not None:
            return FlashInferAttention(cache, heads, self._package, split_pages=self._split_pages)
        page_size = fastest_page_size(cache, heads, self._package, self._log)
        return FlashInferAttention(cache, heads, self._package, page_size=page_size)


def _unrolling(make: Maker) -> Maker:
    """Rows come to the backend one by one."""
    return lambda cache, heads: UnrolledAttention(make(cache, heads))


def _triton_maker(cache: KVCache, heads: int) -> AttentionBackend[Any]:
    from ssd_serve.kernels.triton.attention import TritonAttention
    from ssd_serve.kernels.triton.private import keep_private

    keep_private()
    return TritonAttention(cache, heads)
