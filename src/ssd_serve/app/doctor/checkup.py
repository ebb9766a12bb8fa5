"""`ssd doctor`: what of this machine the server can use, and what to do about the rest.

Goes through the checks of the machine, then tries every tree attention. Knows backends by their own accounts
of themselves; not models.
"""

from collections.abc import Callable, Iterator

import torch

from ssd_serve.app.doctor import checks as machine
from ssd_serve.app.doctor.checks import Check, State
from ssd_serve.base.devices import Device, check_device, parse_device, pin, this_machine
from ssd_serve.base.errors import SsdError, UserError, in_a_line
from ssd_serve.base.settings import Settings
from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.kernels.attention.backends import AttentionOptions, Candidate, attention_for, candidates
from ssd_serve.kernels.attention.self_test import RATIOS, self_test
from ssd_serve.kernels.device import dtype_name, layout_order
from ssd_serve.kernels.native.library import NativeLibrary, load_native
from ssd_serve.models.sizes import attention_dtype, resolve_dtype

__all__ = ["Check", "State", "examine"]

_ATTENTION = "tree attention"
_HEAD_DIM = 128
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def examine(settings: Settings, report: Callable[[str], None]) -> list[Check]:
    """All checks, told as they are begun. None raises."""
    checks: list[Check] = []
    for name, look in _looks(settings):
        report(f"looking at {name}")
        try:
            checks.extend(look())  # what it found before it failed is kept
        except Exception as error:  # a broken driver or installation raises anything
            checks.append(_failed(name, error))
    return checks


def _failed(name: str, error: Exception) -> Check:
    """A look that could not be finished. Nothing is served without tree attention."""
    state = State.PROBLEM if name == _ATTENTION else State.NOTE
    if isinstance(error, UserError):
        return Check(name, state, "could not be looked at", str(error))
    advice = "try what it names by itself, such as the driver's own tools; if that works, please report this"
    return Check(name, state, f"could not be looked at: {in_a_line(error)}", advice)


def _looks(settings: Settings) -> list[tuple[str, Callable[[], Iterator[Check]]]]:
    """What is looked at, in this order."""
    return [
        ("devices", lambda: machine.devices(settings)),
        ("driver", machine.driver),
        ("GPU access", lambda: machine.access(settings)),
        ("torch", lambda: machine.torch_build(settings)),
        ("compiled kernels", lambda: machine.compiled(settings)),
        ("packages", machine.packages),
        ("collectives", machine.collectives),
        (_ATTENTION, lambda: _attention(settings)),
    ]


def _attention(settings: Settings) -> Iterator[Check]:
    """What each backend computes where the target will be, and which one would serve."""
    try:
        device = _target_device(settings)
        served = _attention_dtype(settings, device)
    except SsdError as error:
        yield Check("would serve", State.PROBLEM, "nothing", str(error))
        return
    if device.startswith("cuda:"):
        pin(parse_device(device))  # kernels start on the current GPU
    folder = machine.cache_folder(settings)
    native = load_native(folder) if settings.native_kernels else None
    for dtype in _DTYPES.values() if device != "cpu" else (served,):
        cache = _cache(dtype, device)
        for each in candidates(cache, native, folder):
            yield _tried(each, dtype, device)
    yield _chosen(settings, _cache(served, device), native)


def _target_device(settings: Settings) -> str:
    """torch's name of it. Raises `SettingsError` where this machine does not have it."""
    if settings.target_device:
        device = parse_device(settings.target_device)
        check_device(device, this_machine(), "target_device")
        return Device(device.kind, device.indices[:1]).torch_name  # ranks have equal GPUs
    return "cuda" if torch.cuda.is_available() else "cpu"


def _tried(candidate: Candidate, dtype: torch.dtype, device: str) -> Check:
    name = f"{candidate.name}, {dtype_name(dtype)}"
    if candidate.missing:
        return Check(name, State.OK, "not for this machine", candidate.missing)
    try:
        trials = self_test(candidate.make, dtype, _HEAD_DIM, device, RATIOS)
    except UserError as error:
        return Check(name, State.OK, "not for this dtype or machine", str(error))
    except Exception as error:  # whatever a foreign kernel or its compiler raises
        return Check(name, State.NOTE, in_a_line(error), "it is not used while it fails; please report it")
    wrong = next((str(trial) for trial in trials if not trial.right), "")
    if wrong:
        return Check(name, State.NOTE, wrong, "it is not used while its results are wrong; please report it")
    errors = ", ".join(f"{each.heads.heads}/{each.heads.kv_heads}: {each.error:.1g}" for each in trials)
    return Check(name, State.OK, f"largest error by heads {errors}")


def _chosen(settings: Settings, cache: KVCache, native: NativeLibrary | None) -> Check:
    """What serves with these settings, and what watches it."""
    asked, second = settings.tree_decode_backend, settings.tree_decode_check
    wish = AttentionOptions(
        asked, settings.cache_dir, second, report=lambda _: None, invariant=settings.batch_invariant
    )
    try:
        chosen = attention_for(wish, cache, 16, native)
    except SsdError as error:
        return Check("would serve", State.PROBLEM, "nothing", str(error))
    checked = f", checked by {second}" if second else ""
    where = f"in {dtype_name(cache.layout.dtype)} on {cache.device}"
    found = f"{chosen.name} {where}{checked} (SSD_TREE_DECODE_BACKEND={asked})"
    return Check("would serve", State.OK, found)


def _attention_dtype(settings: Settings, device: str) -> torch.dtype:
    """Of attention with these settings. Raises `UserError` where the device does not have it."""
    name = resolve_dtype(settings.dtype, device)
    return attention_dtype(device, _DTYPES.get(name, torch.bfloat16))  # int8 computes in bf16


def _cache(dtype: torch.dtype, device: str) -> KVCache:
    layout = KVLayout((LayerKV(4, _HEAD_DIM),), dtype, order=layout_order(device))
    return KVCache(layout, 64, device)
