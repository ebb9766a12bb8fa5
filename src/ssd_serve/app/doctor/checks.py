"""What `ssd doctor` sees of the machine: devices, drivers, torch, compiled kernels and packages.

Looks; changes nothing but the folder of compiled kernels. Knows packages and devices by their own accounts of
themselves; not backends, not models.
"""

import importlib.metadata
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from ssd_serve.app.doctor.collective import failure
from ssd_serve.base.devices import parse_device, this_machine
from ssd_serve.base.errors import SettingsError
from ssd_serve.base.settings import Settings
from ssd_serve.cluster.ray.cluster import ray_view
from ssd_serve.kernels.native.library import NativeError, NativeLibrary, build
from ssd_serve.models.parallel import MAX_RANKS

_ARCHITECTURES = ("gfx942", "gfx950")
_KFD = Path("/dev/kfd")
_AMD_DRIVER = Path("/sys/module/amdgpu/version")
_NVIDIA_CONTROL = Path("/dev/nvidiactl")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


class State(Enum):
    """How a check ended."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was looked at, what was found, and what to do about it. A problem keeps the server, as
    it is set, from serving; a note does not."""

    name: str
    state: State
    found: str
    advice: str = ""


def devices(settings: Settings) -> Iterator[Check]:
    """Cores, and GPUs that torch can use, or why there are none."""
    yield Check("cores", State.OK, f"{len(this_machine().cores)} that this process may use")
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
    """Many CPUs have a small GPU: that torch cannot use it is a problem only where it shall serve."""
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
    """The state of a check whose subject keeps a GPU from serving."""
    return State.PROBLEM if _gpu_wanted(settings) else State.NOTE


def driver() -> Iterator[Check]:
    """The GPU driver that is loaded."""
    if _AMD_DRIVER.exists():
        yield Check("driver", State.OK, f"amdgpu {_first_line(_AMD_DRIVER)}".strip())
    elif _NVIDIA_DRIVER.exists():
        yield Check("driver", State.OK, _first_line(_NVIDIA_DRIVER) or "NVIDIA, of no version")
    else:
        yield Check("driver", State.OK, "none for GPUs")


def _first_line(path: Path) -> str:
    """Empty where the file is."""
    return next(iter(path.read_text().splitlines()), "").strip()


def access(settings: Settings) -> Iterator[Check]:
    """Whether this user may open an AMD GPU; nothing where all is well."""
    if _KFD.exists() and not os.access(_KFD, os.R_OK | os.W_OK):
        yield Check(
            "GPU access",
            _as_wanted(settings),
            f"{_KFD} may not be opened by this user",
            "add the user to the groups video and render, and log in again",
        )


def torch_build(settings: Settings) -> Iterator[Check]:
    """The torch that is installed, and whether it is one for this machine's GPU."""
    hip, cuda = torch.version.hip, torch.version.cuda
    built = f"HIP {hip}" if hip else f"CUDA {cuda}" if cuda else "CPU only"
    found = f"{torch.__version__} ({built})"
    if _KFD.exists() and hip is None and cuda is None:
        advice = "this machine has an AMD GPU; to use it, run ./setup_rocm.sh in an image with ROCm's torch"
        yield Check("torch", _as_wanted(settings), found, advice)
    else:
        yield Check("torch", State.OK, found)


def compiled(settings: Settings) -> Iterator[Check]:
    """The kernels in C, compiled now if they are not yet."""
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
    """Where compiled kernels are kept. Raises `SettingsError` where that follows from no home folder."""
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
    """Ray, and what it sees. Whoever needs it names the launcher, so that nothing here is a problem."""
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
    """Of an installed package; empty when it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def collectives() -> Iterator[Check]:
    """The library by which GPUs talk to each other: whether they sum, and whether that can be recorded."""
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
