"""Checks of `ssd doctor`: devices, driver, torch, compiled kernels, packages, collectives, tree attention."""

import importlib.metadata
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from ssd_serve.app.doctor.collective import failure
from ssd_serve.base.contention import cores_in_use
from ssd_serve.base.devices import Device, check_device, parse_device, pin, this_machine
from ssd_serve.base.errors import SettingsError, SsdError, UserError, in_a_line
from ssd_serve.base.settings import Settings
from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.cluster.ray.cluster import ray_view
from ssd_serve.kernels.attention.backends import AttentionOptions, Candidate, attention_for, candidates
from ssd_serve.kernels.attention.self_test import RATIOS, self_test
from ssd_serve.kernels.device import dtype_name, layout_order
from ssd_serve.kernels.native.library import NativeError, NativeLibrary, build, load_native
from ssd_serve.kernels.native.packed import can_multiply_packed
from ssd_serve.models.memory import available_memory
from ssd_serve.models.parallel import MAX_RANKS
from ssd_serve.models.roof import cpu_roofs, roof_dtype
from ssd_serve.models.sizes import PACKED, kv_dtype, resolve_dtype

_ARCHITECTURES = ("gfx942", "gfx950")
_KFD = Path("/dev/kfd")
_AMD_DRIVER = Path("/sys/module/amdgpu/version")
_NVIDIA_CONTROL = Path("/dev/nvidiactl")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


class State(Enum):
    """Result of a check."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Check:
    """A check: its subject, its finding, and advice. With a problem the server cannot serve as it is set."""

    name: str
    state: State
    found: str
    advice: str = ""


def devices(settings: Settings) -> Iterator[Check]:
    """Check cores and GPUs that torch can use, with the reason if there is no GPU."""
    cores = this_machine().cores
    yield Check("cores", State.OK, f"{len(cores)} that this process may use")
    others = cores_in_use(cores)
    slower = "answers are slower while others use cores; the server then uses fewer" if others > 0.5 else ""
    state = State.NOTE if slower else State.OK
    yield Check("other programs", state, f"use {others:.1f} of these cores", slower)
    free = (
        f"{available_memory('cpu') / 2**30:.1f} GiB free; on CPUs the KV cache takes at most a quarter of it"
    )
    yield Check("memory", State.OK, free)
    if not torch.cuda.is_available():
        yield _no_gpu(settings)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        architecture = str(getattr(properties, "gcnArchName", f"sm{properties.major}{properties.minor}"))
        found = f"{properties.name} ({architecture}), {properties.total_memory / 2**30:.0f} GiB"
        known = torch.version.hip is None or architecture.startswith(_ARCHITECTURES)
        advice = "" if known else f"kernels are checked for {' and '.join(_ARCHITECTURES)} only"
        yield Check(f"GPU {index}", State.OK if known else State.NOTE, found, advice)


def _no_gpu(settings: Settings) -> Check:
    """Check a machine without a usable GPU. It is a problem only if the settings name a GPU: many CPUs include one."""
    if _NVIDIA_CONTROL.exists() or _NVIDIA_DRIVER.exists():
        found = "an NVIDIA driver is loaded, but torch cannot use the GPU"
        advice = "install the torch for CUDA, see pytorch.org"
        if torch.version.cuda:
            advice = (
                f"the driver may be too old for CUDA {torch.version.cuda}, or CUDA_VISIBLE_DEVICES hides it"
            )
    elif _KFD.exists():
        found = "an AMD driver is loaded, but torch cannot use the GPU"
        advice = "./setup_rocm.sh --check says what is missing"
    elif _gpu_wanted(settings):
        found = "none, and no driver of one is loaded"
        advice = "set SSD_TARGET_DEVICE and SSD_DRAFT_DEVICE to cpu, or install the GPU's driver"
    else:
        return Check("GPUs", State.OK, "none; the CPU serves")
    return Check("GPUs", _as_wanted(settings), found, advice)


def _gpu_wanted(settings: Settings) -> bool:
    named = (settings.target_device, settings.draft_device)
    return any(parse_device(each).kind == "cuda" for each in named if each)


def _as_wanted(settings: Settings) -> State:
    """Return the state of a check with a finding that keeps a GPU from serving."""
    return State.PROBLEM if _gpu_wanted(settings) else State.NOTE


def driver() -> Iterator[Check]:
    """Check which GPU driver is loaded."""
    if _AMD_DRIVER.exists():
        yield Check("driver", State.OK, f"amdgpu {_first_line(_AMD_DRIVER)}".strip())
    elif _NVIDIA_DRIVER.exists():
        yield Check("driver", State.OK, _first_line(_NVIDIA_DRIVER) or "NVIDIA, of no version")
    else:
        yield Check("driver", State.OK, "none for GPUs")


def _first_line(path: Path) -> str:
    """Return the first line, or an empty string for an empty file."""
    return next(iter(path.read_text().splitlines()), "").strip()


def access(settings: Settings) -> Iterator[Check]:
    """Check that this user may open an AMD GPU; nothing is reported if so."""
    if _KFD.exists() and not os.access(_KFD, os.R_OK | os.W_OK):
        yield Check(
            "GPU access",
            _as_wanted(settings),
            f"{_KFD} may not be opened by this user",
            "add the user to the groups video and render, and log in again",
        )


def torch_build(settings: Settings) -> Iterator[Check]:
    """Check that the installed torch is built for this machine's GPU."""
    hip, cuda = torch.version.hip, torch.version.cuda
    built = f"HIP {hip}" if hip else f"CUDA {cuda}" if cuda else "CPU only"
    found = f"{torch.__version__} ({built})"
    if _KFD.exists() and hip is None and cuda is None:
        advice = "this machine has an AMD GPU; to use it, run ./setup_rocm.sh in an image with ROCm's torch"
        yield Check("torch", _as_wanted(settings), found, advice)
    else:
        yield Check("torch", State.OK, found)


def compiled(settings: Settings) -> Iterator[Check]:
    """Check the kernels in C, which are compiled now if necessary."""
    if not settings.native_kernels:
        yield Check(
            "compiled kernels", State.NOTE, "switched off", "unset SSD_NATIVE_KERNELS: CPUs are faster"
        )
        return
    try:
        library = NativeLibrary(build(cache_folder(settings)))
    except NativeError as error:
        yield Check("compiled kernels", State.NOTE, str(error), "CPUs decode faster with them: gcc or clang")
    else:
        yield Check("compiled kernels", State.OK, library.path.name)


def cache_folder(settings: Settings) -> Path:
    """Folder of compiled kernels. Raises `SettingsError` if the user has no home folder."""
    try:
        return settings.cache_dir.expanduser()
    except RuntimeError as error:
        raise SettingsError(
            f"{settings.cache_dir} is nowhere, for this user has no home folder: "
            "set SSD_CACHE_DIR to a folder that can be written"
        ) from error


def packages() -> Iterator[Check]:
    """Packages that the server can use, and those that this machine's GPU lacks."""
    on_gpu, rocm = torch.cuda.is_available(), torch.version.hip is not None
    flashinfer = "tree attention is taken from FlashInfer first: "
    for name, lacking, advice in (
        ("triton", on_gpu, "tree attention on GPUs needs it: pip install 'ssd-serve[triton]'"),
        ("flashinfer-python", on_gpu and not rocm, f"{flashinfer}pip install 'ssd-serve[flashinfer]'"),
        ("amd-flashinfer", on_gpu and rocm, f"{flashinfer}./setup_rocm.sh installs it"),
    ):
        version = _version(name)
        if version or not lacking:
            yield Check(name, State.OK, version or "not installed")
        else:
            yield Check(name, State.NOTE, "not installed", advice)
    yield _ray()


def _ray() -> Check:
    """Check Ray and the devices that it detects. It is never a problem: only SSD_LAUNCHER=ray needs Ray."""
    version = _version("ray")
    if not version:
        return Check("ray", State.OK, "not installed (only SSD_LAUNCHER=ray needs it)")
    seen, gpus = ray_view(), torch.cuda.device_count()
    if seen.failure:
        advice = "`python -m ssd_serve.cluster.ray.cluster` shows where it stops"
        return Check("ray", State.NOTE, f"{version}, but it does not start: {seen.failure}", advice)
    kinds = f" ({', '.join(seen.kinds)})" if seen.kinds else ""
    found = f"{version}, sees {seen.cores} cores and {seen.gpus} GPUs{kinds}"
    if seen.gpus < gpus:
        advice = (
            f"torch sees {gpus}. A Ray that ssd starts is told so; start others with --num-gpus={gpus}"
            + (", or pip install /opt/rocm/share/amd_smi" if torch.version.hip else "")
        )
        return Check("ray", State.NOTE, found, advice)
    return Check("ray", State.OK, found)


def _version(package: str) -> str:
    """Version of an installed package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def collectives() -> Iterator[Check]:
    """Check that the communication library of the GPUs sums, and that graphs can capture it."""
    if not torch.cuda.is_available():
        return
    name = "RCCL" if torch.version.hip else "NCCL"
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        yield Check(name, State.NOTE, "torch was built without it", "one model on one GPU works without")
        return
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    devices = [f"cuda:{index}" for index in range(min(MAX_RANKS, torch.cuda.device_count()))]
    where = devices[0] if len(devices) == 1 else f"{devices[0]} to {devices[-1]}"
    again = "NCCL_DEBUG=INFO python -m ssd_serve.app.doctor.collective"
    wrong = failure(devices)
    if wrong:
        advice = f"one model on one GPU works without; `{again} {' '.join(devices)}` shows where it stops"
        yield Check(name, State.NOTE, f"{version}, but a sum on {where} fails: {wrong}", advice)
        return
    wrong = failure(devices, captured=True)
    if wrong:
        advice = (
            f"set SSD_GRAPHS=false for ranks; `{again} --captured {' '.join(devices)}` shows where it stops"
        )
        yield Check(name, State.NOTE, f"{version}, sums on {where}, but not when captured: {wrong}", advice)
    else:
        yield Check(name, State.OK, f"{version}, sums on {where}, also captured")


_ATTENTION = "tree attention"
_HEAD_DIM = 128
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def examine(settings: Settings, report: Callable[[str], None]) -> list[Check]:
    """Run all checks; `report` receives each one's name as it starts. Raises nothing."""
    checks: list[Check] = []
    for name, look in _looks(settings):
        report(f"looking at {name}")
        try:
            checks.extend(look())  # keeps the results before an exception
        except Exception as error:  # broken drivers and installations raise any exception
            checks.append(_failed(name, error))
    return checks


def _failed(name: str, error: Exception) -> Check:
    """Return the result of a check that raised. Without tree attention the server cannot work."""
    state = State.PROBLEM if name == _ATTENTION else State.NOTE
    if isinstance(error, UserError):
        return Check(name, state, "could not be looked at", str(error))
    advice = "try what it names by itself, such as the driver's own tools; if that works, please report this"
    return Check(name, state, f"could not be looked at: {in_a_line(error)}", advice)


def _looks(settings: Settings) -> list[tuple[str, Callable[[], Iterator[Check]]]]:
    return [
        ("devices", lambda: devices(settings)),
        ("driver", driver),
        ("GPU access", lambda: access(settings)),
        ("torch", lambda: torch_build(settings)),
        ("compiled kernels", lambda: compiled(settings)),
        ("packages", packages),
        ("collectives", collectives),
        (_ATTENTION, lambda: _attention(settings)),
        ("speed", lambda: _speed(settings)),
    ]


def _speed(settings: Settings) -> Iterator[Check]:
    """Report what the cores can do, from the table of `ssd plan` and serving; it is measured where it is empty."""
    if _target_device(settings) != "cpu":
        return
    folder = cache_folder(settings)
    native = load_native(folder) if settings.native_kernels else None
    packed = native is not None and can_multiply_packed(native)
    dtype = PACKED if packed else roof_dtype(resolve_dtype(settings.dtype, "cpu", native))
    for roof in cpu_roofs(this_machine().cores, dtype, folder, native):
        yield Check(f"speed of {roof.cores} core(s)", State.OK, str(roof))


def _attention(settings: Settings) -> Iterator[Check]:
    """Try every attention backend on the target's device, and name the one that would serve."""
    folder = cache_folder(settings)
    native = load_native(folder) if settings.native_kernels else None
    try:
        device = _target_device(settings)
        served = _kv_dtype(settings, device, native)
    except SsdError as error:
        yield Check("would serve", State.PROBLEM, "nothing", str(error))
        return
    if device.startswith("cuda:"):
        pin(parse_device(device))  # kernels start on the current GPU
    for dtype in _DTYPES.values() if device != "cpu" else (served,):
        cache = _cache(dtype, device)
        for each in candidates(cache, native, folder):
            yield _tried(each, dtype, device)
    yield _chosen(settings, _cache(served, device), native)


def _target_device(settings: Settings) -> str:
    """Return torch's name of the target's device. Raises `SettingsError` if this machine does not have it."""
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
    except Exception as error:  # foreign kernels and compilers raise any exception
        return Check(name, State.NOTE, in_a_line(error), "it is not used while it fails; please report it")
    wrong = next((str(trial) for trial in trials if not trial.right), "")
    if wrong:
        return Check(name, State.NOTE, wrong, "it is not used while its results are wrong; please report it")
    errors = ", ".join(f"{each.heads.heads}/{each.heads.kv_heads}: {each.error:.1g}" for each in trials)
    return Check(name, State.OK, f"largest error by heads {errors}")


def _chosen(settings: Settings, cache: KVCache, native: NativeLibrary | None) -> Check:
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


def _kv_dtype(settings: Settings, device: str, native: NativeLibrary | None) -> torch.dtype:
    """Return the KV cache's dtype with these settings. Raises `UserError` if the device does not support it."""
    name = resolve_dtype(settings.dtype, device, native)
    return kv_dtype(device, _DTYPES.get(name, torch.bfloat16), native)  # int8 computes in bf16


def _cache(dtype: torch.dtype, device: str) -> KVCache:
    layout = KVLayout((LayerKV(4, _HEAD_DIM),), dtype, order=layout_order(device))
    return KVCache(layout, 64, device)
