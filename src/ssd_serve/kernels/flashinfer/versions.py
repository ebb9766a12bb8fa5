"""Checks which FlashInfer is installed: upstream's package on CUDA, AMD's port on ROCm.

Both are imported as `flashinfer`, and overwrite each other's files. Knows names and versions, not what the
packages compute.
"""

import importlib.metadata
import re
from collections.abc import Mapping

from ssd_serve.base.errors import UserError

UPSTREAM = "flashinfer-python"
PORT = "amd-flashinfer"

_OLDEST_UPSTREAM = (0, 7, 2)  # the oldest that was read
_OLDEST_PORT = (0, 5, 3, 2)  # 0.5.3+amd.2, the first with both corrections (AMD's pull request 214)


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
