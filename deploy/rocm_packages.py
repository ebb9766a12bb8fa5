"""Versions of torch, FlashInfer, Triton and ssd-serve in a Python, as NAME=VALUE lines for setup_rocm.sh."""

import importlib
import importlib.metadata as metadata
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.specifiers import SpecifierSet
from pip._vendor.packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

TRITONS = ("triton", "pytorch-triton-rocm", "triton-rocm")
TORCH_AND_ITS_OWN = ("torch", "torchvision", "torchaudio", *TRITONS)


def main(root: Path, constraints: str, flashinfer_spec: str, floor: str) -> None:
    """Print the facts.

    `constraints` is a file of exact versions, or empty; `floor` is the oldest FlashInfer that may be used.
    """
    major, minor, *_ = sys.version_info
    facts = {"python": f"{major}.{minor}", "managed": "yes" if _belongs_to_the_system() else ""}
    facts |= torch_facts() | flashinfer_facts(flashinfer_spec, Version(floor)) | package_facts(root)
    pinned = (*TORCH_AND_ITS_OWN, "numpy")
    facts["pins"] = " ".join(f"{name}=={version(name)}" for name in pinned if version(name))
    facts["differs"] = differences(facts, Path(constraints)) if constraints else ""
    for name, value in facts.items():
        print(f"{name}={value.splitlines()[0] if value else ''}")


def version(name: str) -> str:
    """The installed version, or an empty text."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def torch_facts() -> dict[str, str]:
    """Versions of torch and of the HIP or CUDA that it is built for, and whether Triton is there."""
    facts = {"torch": "", "hip": "", "cuda": "", "rocm": "", "torch_error": "", "triton": ""}
    # A damaged torch raises any error, such as OSError, and is reported like a missing one.
    try:
        torch = importlib.import_module("torch")
        hip, cuda = torch.version.hip or "", torch.version.cuda or ""
        rocm = ".".join(hip.split(".")[:2])
        facts |= {"torch": str(torch.__version__), "hip": hip, "cuda": cuda, "rocm": rocm}
    except Exception as error:
        facts["torch_error"] = f"{type(error).__name__}: {error}"
    try:
        importlib.import_module("triton")
        facts["triton"] = "there"
    except Exception:
        facts["triton"] = ""
    facts["torch_for_pip"] = version("torch")
    needs = applicable(metadata.requires("torch") or []) if version("torch") else []
    triton = [f"{each.name}{each.specifier}" for each in needs if each.name in TRITONS]
    facts["triton_spec"] = triton[0] if triton else ""
    return facts


def flashinfer_facts(spec: str, floor: Version) -> dict[str, str]:
    """Installed version of FlashInfer, the requirement for pip, and their compatibility."""
    found = version("amd-flashinfer")
    facts = {"flashinfer": found, "flashinfer_state": "missing", "spec": "", "spec_url": "", "spec_error": ""}
    facts |= {"upstream": version("flashinfer-python"), "prebuilt": version("amd-flashinfer-jit-cache")}
    try:
        wanted = Requirement(without_local_bounds(spec))
    except ValueError as error:
        return facts | {"spec_error": str(error)}
    exact = [each.version for each in wanted.specifier if each.operator == "==" and "*" not in each.version]
    too_old = any(Version(each) < floor for each in exact)
    if wanted.name.lower().replace("_", "-") != "amd-flashinfer" or too_old:
        return facts | {"spec_error": f"it must name amd-flashinfer, and no version before {floor}"}
    if wanted.url is None:
        wanted.specifier &= SpecifierSet(without_local_bounds(f">={floor}"))
    facts |= {"spec": str(wanted), "spec_url": wanted.url or ""}
    if found:
        fits = wanted.specifier.contains(found, prereleases=True)
        facts["flashinfer_state"] = "old" if Version(found) < floor else "ok" if fits else "other"
    return facts


def without_local_bounds(spec: str) -> str:
    """The same requirement as packaging standards allow it: `>=` takes no local version such as `+amd.2`."""

    def excluded(match: re.Match[str]) -> str:
        base, patch = match[1], int(match[2])
        return ",".join([f">={base}", *(f"!={base}+amd.{older}" for older in range(patch))])

    return re.sub(r">=\s*([\w.!]+)\+amd\.(\d+)", excluded, spec)


def package_facts(root: Path) -> dict[str, str]:
    """Compare the installation with this checkout, and list missing requirements of it and of FlashInfer."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installed = version("ssd-serve")
    origin = metadata.distribution("ssd-serve").read_text("direct_url.json") if installed else None
    here = installed == project["version"] and json.loads(origin or "{}").get("url") == root.as_uri()
    flashinfer = metadata.requires("amd-flashinfer") or [] if version("amd-flashinfer") else []
    missing = dict.fromkeys(unmet([*project["dependencies"], *flashinfer]))
    return {"package": "yes" if here else "", "unmet": " ".join(missing)}


def applicable(requirements: Iterable[str]) -> list[Requirement]:
    """Requirements of this Python and system, without extras."""
    parsed = [Requirement(text) for text in requirements]
    return [each for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})]


def unmet(requirements: Iterable[str]) -> Iterator[str]:
    """Requirements that are not installed, as one word each; never torch and what belongs to it."""
    for each in applicable(requirements):
        found = version(each.name)
        met = bool(found) and each.specifier.contains(found, prereleases=True)
        if not met and each.name.lower() not in TORCH_AND_ITS_OWN:
            yield f"{each.name}{each.specifier}"


def differences(facts: dict[str, str], constraints: Path) -> str:
    """Differences of Python, ROCm and torch from the file of exact versions, in words."""
    text = constraints.read_text(encoding="utf-8")
    found: list[str] = []
    for name in ("python", "rocm", "torch"):
        named = re.search(rf"^(?:# {name}: |{name}==)(\S+)", text, re.MULTILINE)
        here = facts[name].partition("+")[0]
        if named and named[1] != here:
            found.append(f"{name} {here or 'missing'} instead of {named[1]}")
    return ", ".join(found)


def _belongs_to_the_system() -> bool:
    allowed = os.environ.get("PIP_BREAK_SYSTEM_PACKAGES", "").lower() in ("1", "true", "yes", "on")
    marker = Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    return sys.prefix == sys.base_prefix and marker.exists() and not allowed


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
