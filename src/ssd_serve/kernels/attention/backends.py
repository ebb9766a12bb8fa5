"""Chooses the tree attention: the backend that the settings name, or the fastest that proves right on this
device.

A backend that fails its self-test is an error if it was named, and skipped with a warning under `auto`. Knows
the table in `base/attention_backends.py`; not how backends are made or compute.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ssd_serve.base.attention_backends import (
    AUTO,
    BACKENDS,
    VARIABLE,
    RegisteredBackend,
    Where,
    choices,
)
from ssd_serve.base.errors import UserError, in_a_line
from ssd_serve.base.logs import Logger
from ssd_serve.base.trusted_files import cache_folder
from ssd_serve.cache.kv import KVCache
from ssd_serve.kernels.attention.checked import CheckedAttention, Difference
from ssd_serve.kernels.attention.contract import AttentionBackend, AttentionFactory, BackendContext, Maker
from ssd_serve.kernels.attention.invariance import UnrolledAttention, depends_on_batch
from ssd_serve.kernels.attention.self_test import Heads, attention_seconds, failure_of
from ssd_serve.kernels.native.library import NativeLibrary

DEVICE_SCRATCH_BYTES = 1536 << 20
"""GPU memory besides weights and cache: a backend's workspace, captured forwards, and a large batch's logits.
"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that may run."""

    name: str
    missing: str
    """Missing requirement, and what to do about it; empty: none."""
    make: Maker
    invariant: bool = False
    """True if results must not depend on the batch."""


@dataclass(frozen=True, slots=True)
class ChosenAttention:
    """The backend that runs, and its name."""

    name: str
    backend: AttentionBackend[Any]


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of the tree attention."""

    backend: str = AUTO
    folder: Path = Path("~/.cache/ssd-serve")
    """Folder of kernels that are compiled at their first use."""
    check: str = ""
    """Backend that recomputes some batches; empty: none."""
    report: Callable[[Difference], None] | None = None
    """Called with each difference that `check` finds."""
    invariant: bool = False
    """A row's result must be the same to the bit in any batch, tree or chunk."""
    measured: bool = True
    """On GPUs the fastest is found by measuring; else the first is taken, which is the same on equal devices.
    """


def attention_for(
    options: AttentionOptions,
    cache: KVCache,
    heads: int,
    native: NativeLibrary | None,
    log: Logger | None = None,
) -> ChosenAttention:
    """Choose and make the backend that serves, checked by a second one if `check` names it. Raises
    `UserError`."""
    folder = cache_folder(options.folder, log.warning if log is not None else lambda _line: None)
    found = candidates(cache, native, folder, log, invariant=options.invariant)
    device = cache.device

    def seconds(make: Maker) -> float:
        return attention_seconds(make, cache.layout, heads, str(device))

    measure = seconds if options.measured and device.type != "cpu" else None  # on CPUs the order is known
    chosen = choose_attention(options.backend, cache, heads, found, log, measure)
    if not options.check or options.report is None:
        return chosen
    second = choose_attention(options.check, cache, heads, candidates(cache, native, folder)).backend
    return ChosenAttention(chosen.name, CheckedAttention(chosen.backend, second, options.report))


def candidates(
    cache: KVCache,
    native: NativeLibrary | None,
    folder: Path,
    log: Logger | None = None,
    *,
    invariant: bool = False,
) -> list[Candidate]:
    """Return all backends of the table, in its order; see `BackendContext`."""
    context = BackendContext(native, folder, log, invariant)
    found: list[Candidate] = []
    for name, row in BACKENDS.items():
        factory: AttentionFactory = resolve_name(row.factory)
        make = factory.maker(context)
        if invariant and not factory.rows_alone:
            make = _unrolling(make)
        found.append(Candidate(name, _missing(row, factory, cache, context), make, invariant))
    return found


def choose_attention(
    asked: str,
    cache: KVCache,
    heads: int,
    found: Sequence[Candidate],
    log: Logger | None = None,
    seconds: Callable[[Maker], float] | None = None,
) -> ChosenAttention:
    """Make the backend named `asked`, or under `auto` the fastest of `found` that is present and right.

    `seconds` measures one; without it the first is the fastest. Raises `UserError` if the named one cannot be
    used, or none can.
    """
    right = _right(asked, cache, heads, found, log)
    if asked != AUTO or seconds is None:
        return _chosen(next(right, None), asked, cache, heads, found, log)
    times = {each: taken for each in right if (taken := _measured(each, seconds, log)) is not None}
    fastest = min(times, key=times.__getitem__, default=None)
    microseconds = {f"{each.name}_us": round(1e6 * taken) for each, taken in times.items()}
    return _chosen(fastest, asked, cache, heads, found, log, **microseconds)


def _chosen(
    candidate: Candidate | None,
    asked: str,
    cache: KVCache,
    heads: int,
    found: Sequence[Candidate],
    log: Logger | None,
    **microseconds: int,
) -> ChosenAttention:
    if candidate is None:
        lacks = "; ".join(f"{each.name}: {each.missing}" for each in found if each.missing)
        raise UserError(
            f"no tree attention passes its self-test here (asked for: {asked}); run `ssd doctor`"
            + (f" ({lacks})" if lacks else "")
        )
    if log is not None:
        log.info("tree attention", backend=candidate.name, **microseconds)
    return ChosenAttention(candidate.name, candidate.make(cache, heads))


def _right(
    asked: str, cache: KVCache, heads: int, found: Sequence[Candidate], log: Logger | None
) -> Iterator[Candidate]:
    """Yield the candidates that match `asked`, lack nothing and pass their self-test."""
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
    except Exception as error:  # any error of a foreign kernel or its compiler
        if log is not None:
            reason = in_a_line(error)
            log.warning("tree attention skipped: it cannot be timed", backend=candidate.name, reason=reason)
        return None


def _failure(candidate: Candidate, cache: KVCache, heads: int) -> str:
    """Describe what is wrong with its results for any shape of layer in this cache; empty: nothing."""
    dtype, device = cache.layout.dtype, str(cache.device)
    shapes = dict.fromkeys(replace(layer, window=None) for layer in cache.layout.layers)
    forms = [Heads(heads, each.heads, each.head_dim, dtype, each) for each in shapes]
    wrong = failure_of(candidate.make, forms, device)
    if not wrong and candidate.invariant:
        depending = (form for form in forms if depends_on_batch(candidate.make, form, device))
        wrong = next((f"{form}: a row's result depends on its batch" for form in depending), "")
    return wrong and f"its self-test failed ({wrong}); use {VARIABLE}=auto or sdpa"


def _missing(
    row: RegisteredBackend, factory: AttentionFactory, cache: KVCache, context: BackendContext
) -> str:
    lacks = factory.refuses(cache) or factory.missing(cache, context)
    on_cpu = cache.device.type == "cpu"
    if not lacks and row.where is (Where.GPUS if on_cpu else Where.CPUS):
        needed, here = ("GPU", Where.CPUS) if on_cpu else ("CPU", Where.GPUS)
        lacks = f"it needs a {needed}; use {VARIABLE}={choices(here)}"
    if not lacks and row.package and find_spec(row.package) is None:
        lacks = (
            f'it is not installed: pip install "ssd-serve[{row.package}]" on CUDA, ./setup_rocm.sh on ROCm'
        )
    return lacks


def _unrolling(make: Maker) -> Maker:
    return lambda cache, heads: UnrolledAttention(make(cache, heads))
