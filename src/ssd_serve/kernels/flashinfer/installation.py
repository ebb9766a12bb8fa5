"""Finds the installed FlashInfer, and prepares the folder where it compiles kernels.

Upstream's package is for CUDA, AMD's port for ROCm. Both are imported as `flashinfer`, and overwrite each
other's files.

FlashInfer compiles on first use and keeps the result. Its own folder names contain its version and the GPU,
but not the version of torch, although the objects are linked with torch's libraries. The port 0.5.3+amd.2
writes `build.ninja` only once, so new flags or a moved installation have no effect. (Upstream 0.7.2.post1 and
the port's main branch rewrite it.) So each combination has a folder here, and kernels older than the package
are removed.

The port has not been run yet. Knows names, versions and files, not what the packages compute.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ssd_serve.base.errors import PermissionProblemError, UserError
from ssd_serve.base.trusted_files import is_own, make_folder, weakness

UPSTREAM = "flashinfer-python"
PORT = "amd-flashinfer"

_OLDEST_UPSTREAM = (0, 7, 2)  # the oldest that was read
_OLDEST_PORT = (0, 5, 3, 2)  # 0.5.3+amd.2, the first with both corrections (AMD's pull request 214)
_PREBUILT_PORT = "amd-flashinfer-jit-cache"
_PORT_ARCHITECTURES = ("gfx942", "gfx950")
_HEADERS = ("include", "data/include")
_SOURCES = (*_HEADERS, "csrc", "csrc_rocm", "data/csrc", "jit")
"""Source folders of both packages; kernels older than a file in them are stale."""


def installed_versions() -> dict[str, str]:
    """Return the versions of the installed packages, by name."""
    found = {name: installed_version(name) for name in (UPSTREAM, PORT)}
    return {name: version for name, version in found.items() if version is not None}


def installed_version(name: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def choose(versions: Mapping[str, str], *, rocm: bool) -> tuple[str, str]:
    """The name and version of the package to use with a torch for ROCm, or for CUDA.

    Raises UserError where it is missing, too old, or mixed with the other one.
    """
    wanted = PORT if rocm else UPSTREAM
    if len(versions) > 1:
        raise UserError(
            f"{UPSTREAM} and {PORT} are both installed and overwrite each other's files: "
            f"uninstall both, then install {wanted} alone"
        )
    if wanted not in versions:
        raise UserError(
            _missing(rocm) + (" (what is installed is for the other kind of GPU)" if versions else "")
        )
    version = versions[wanted]
    _refuse_old(wanted, version)
    return wanted, version


def _missing(rocm: bool) -> str:
    if rocm:
        return "FlashInfer attention on ROCm needs the package amd-flashinfer: install 0.5.3+amd.2 or later"
    return "FlashInfer attention needs the package flashinfer-python: pip install 'ssd-serve[flashinfer]'"


def _refuse_old(name: str, version: str) -> None:
    """Raise UserError for versions that are known to be wrong, or too old to be known.

    A port built from a commit between its releases may name no `amd` number; whether such a one is right
    is for a numeric self-test to say.
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    release = tuple(int(part or 0) for part in found.groups()) if found else (0, 0, 0)
    if name == UPSTREAM:
        if release < _OLDEST_UPSTREAM:
            raise UserError(f"{name} {version} is too old: pip install --upgrade 'flashinfer-python>=0.7.2'")
        return
    amd = re.search(r"\+amd\.(\d+)(rc)?", version)
    number = int(amd[1]) - bool(amd[2]) if amd else 0
    unnumbered = amd is None and ".post" in version and release >= _OLDEST_PORT[:3]
    if (*release, number) < _OLDEST_PORT and not unnumbered:
        raise UserError(
            f"{name} {version} computes wrong attention (in bfloat16, softmax sums are 1.875 times too "
            "large, and masks hit the wrong heads of grouped queries): install 0.5.3+amd.2 or later"
        )


@dataclass(frozen=True, slots=True)
class Build:
    """Inputs of a compilation."""

    name: str
    """The package."""
    version: str
    torch: str
    architecture: str
    """Name from `architecture`, e.g. gfx942 or 9.0."""

    @property
    def folder_name(self) -> str:
        """Folder name, one for each combination."""
        parts = (self.name, self.version, f"torch-{self.torch}", self.architecture)
        return "-".join(re.sub(r"[^0-9A-Za-z._]+", "_", part) for part in parts)


def architecture(device: torch.device) -> str:
    """The GPU's architecture as FlashInfer's variables take it: gfx942, or a capability such as 9.0."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(getattr(properties, "gcnArchName", "unknown")).split(":")[0]
    return f"{properties.major}.{properties.minor}"


def package_folder() -> Path | None:
    """Return the folder of the package `flashinfer` without importing it."""
    found = importlib.util.find_spec("flashinfer")
    places = None if found is None else found.submodule_search_locations
    return Path(places[0]) if places else None


def use_folder(base: Path, build: Build, package: Path | None) -> list[str]:
    """Make FlashInfer compile into a folder of this build's own under `base`; returns what was cleared there.

    To be called before FlashInfer is imported, with the GPU of `build` as the current device: it reads its
    variables, and names folders, while it is imported. This is the one place that writes them.

    Raises UserError where FlashInfer is imported already and compiles elsewhere, for GPUs that the port has
    no kernels for, and for prebuilt kernels of another version. Raises PermissionProblemError where the
    folder cannot be made.
    """
    _refuse_unsupported(build)
    _refuse_prebuilt(build, installed_version(_PREBUILT_PORT))
    folder = (base / build.folder_name).absolute()  # a relative one or ~ would be taken literally
    _refuse_late(folder)
    try:
        make_folder(folder)
        if why := weakness(folder):
            raise PermissionProblemError(f"compiled kernels would not be FlashInfer's own: {why}")
        cleared = _close(folder) + clear_stale(folder, package)
    except OSError as error:
        raise PermissionProblemError(
            f"cannot write compiled kernels to {folder}: {error.strerror}"
        ) from error
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(folder)
    # By default the port prepares flags for gfx942 (all versions read), upstream for all GPUs in sight.
    variable = "FLASHINFER_ROCM_ARCH_LIST" if build.name == PORT else "FLASHINFER_CUDA_ARCH_LIST"
    os.environ[variable] = build.architecture
    return cleared


def _close(folder: Path) -> list[str]:
    """Close the folder to other users: a umask of 002 would let a group write below it. What is in it is
    cleared, and returned, if others could have written it before."""
    facts = folder.stat()
    if not facts.st_mode & 0o077 or facts.st_uid != os.getuid():
        return []
    folder.chmod(0o700)
    strange = [path.name for path in folder.rglob("*") if not is_own(path)]
    if strange:
        shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
    return strange


def clear_stale(folder: Path, package: Path | None) -> list[str]:
    """Remove the kernels under `folder` that were not compiled from the current package; return their names.

    A kernel is stale if it has no `build.ninja`, if that file is older than a source of the package, or if
    that file takes headers from another installation. Ninja keeps everything else up to date.
    """
    newest = _newest(package)
    headers = [str(path.resolve()) for path in _existing(package, _HEADERS)]
    cleared: list[str] = []
    for kernel in sorted(folder.glob(".cache/flashinfer/*/*/cached_ops/*")):
        if kernel.is_dir() and _is_stale(kernel, newest, headers):
            # Another process may be clearing the same.
            shutil.rmtree(kernel, ignore_errors=True)
            cleared.append(kernel.name)
    return cleared


def _is_stale(kernel: Path, newest: float, headers: Sequence[str]) -> bool:
    recipe = kernel / "build.ninja"
    if not recipe.is_file():
        # A folder in which ninja has not begun holds nothing old.
        return any(kernel.glob("*.so")) or any(kernel.glob("*.o"))
    if recipe.stat().st_mtime < newest:
        return True
    text = recipe.read_text(errors="replace")
    return bool(headers) and not any(header in text for header in headers)


def _newest(package: Path | None) -> float:
    """Return the time at which the youngest source was written, in seconds; 0 without sources."""
    files = (file for folder in _existing(package, _SOURCES) for file in folder.rglob("*"))
    return max((file.stat().st_mtime for file in files if file.suffix not in ("", ".pyc")), default=0.0)


def _existing(package: Path | None, names: Sequence[str]) -> list[Path]:
    return [] if package is None else [package / name for name in names if (package / name).is_dir()]


def _refuse_unsupported(build: Build) -> None:
    if build.name == PORT and build.architecture not in _PORT_ARCHITECTURES:
        raise UserError(
            f"{PORT} has kernels for {' and '.join(_PORT_ARCHITECTURES)} only, this GPU is a "
            f"{build.architecture}: use another attention backend"
        )


def _refuse_prebuilt(build: Build, version: str | None) -> None:
    """Prebuilt kernels are used before any that would be compiled, even if the sources have changed.

    The port checks this too unless a variable of its users switches the check off; upstream 0.7.2.post1
    passes over prebuilt kernels of other versions.
    """
    if build.name == PORT and version is not None and not version.startswith(build.version):
        raise UserError(
            f"{_PREBUILT_PORT} {version} holds kernels of another version than {PORT} {build.version}: "
            f"pip uninstall {_PREBUILT_PORT}"
        )


def _refuse_late(folder: Path) -> None:
    """FlashInfer that is imported already has chosen its folder."""
    module = sys.modules.get("flashinfer.jit.env")
    if module is None and "flashinfer" not in sys.modules:
        return
    if getattr(module, "FLASHINFER_BASE_DIR", None) != folder:
        raise UserError(
            "FlashInfer was imported before its folder for compiled kernels was chosen: "
            "do not import flashinfer in a process that serves"
        )
