"""Test double of pip: records each call, and simulates the installation.

Runs as a program: PLACE ARGUMENTS. PLACE is the folder of the machine (machine.py): calls go to
PLACE/pip.jsonl, packages into PLACE/site. PLACE/mood.json configures the network, the package indexes and
the treatment of torch: pip keeps it, replaces it, or replaces it unless a constraint or --no-deps prevents it.
"""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

NO_NETWORK = (
    "WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by "
    "'NewConnectionError: Failed to establish a new connection: Network is unreachable'\n"
    "ERROR: Could not find a version that satisfies the requirement"
)
CUDA_TORCH = "2.13.0"
MODULES = {"amd-flashinfer": "flashinfer", "triton": "triton"}


def write_package(
    site: Path, name: str, version: str, requires: Sequence[str] = (), origin: str = ""
) -> None:
    """Write the metadata of an installed package, and remove that of other versions."""
    folder = name.replace("-", "_")
    for old in site.glob(f"{folder}-*.dist-info"):
        shutil.rmtree(old)
    info = site / f"{folder}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if origin:
        (info / "direct_url.json").write_text(json.dumps({"url": origin, "dir_info": {"editable": True}}))


def write_module(site: Path, name: str, source: str) -> None:
    """Write an importable module, replacing one of the same name."""
    shutil.rmtree(site / "__pycache__", ignore_errors=True)
    (site / f"{name}.py").write_text(source, encoding="utf-8")


def write_torch(site: Path, version: str, hip: str | None, cuda: str | None) -> None:
    """Write a torch of that version and GPU platform, which requires the Triton of its own build."""
    lines = [f"__version__ = {version!r}", "class version:", f"    hip = {hip!r}", f"    cuda = {cuda!r}"]
    write_module(site, "torch", "\n".join(lines) + "\n")
    write_package(site, "torch", version, ["triton==3.5.1+rocm7.2.0", "sympy>=1.13.3"])


class Pip:
    def __init__(self, place: Path) -> None:
        self.site = place / "site"
        self.mood: dict[str, Any] = json.loads((place / "mood.json").read_text(encoding="utf-8"))
        files = [Path(name) for name in os.environ.get("PIP_CONSTRAINT", "").split()]
        lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
        self.constraints = [line for line in lines if line and not line.startswith("#")]

    def run(self, arguments: list[str]) -> int:
        """Simulate the command, and return its exit code."""
        if arguments[0] == "uninstall":
            for old in self.site.glob(f"{arguments[-1].replace('-', '_')}-*.dist-info"):
                shutil.rmtree(old)
            return 0
        if self.mood["offline"]:
            print(NO_NETWORK, file=sys.stderr)
            return 1
        if not all(self._install(word, arguments) for word in self._wanted(arguments)):
            return 1
        torch = next(self.site.glob("torch-*")).name.removeprefix("torch-").removesuffix(".dist-info")
        held = f"torch=={torch}" in self.constraints or "--no-deps" in arguments
        if self.mood["torch"] == "replaces" or (self.mood["torch"] == "wants" and not held):
            write_torch(self.site, CUDA_TORCH, None, "13.0")
        return 0

    def _wanted(self, arguments: list[str]) -> list[str]:
        with_value = ("--index-url", "--find-links")
        words = arguments[1:]
        return [
            word
            for before, word in zip(["", *words], words, strict=False)
            if not word.startswith("-") and before not in with_value
        ]

    def _install(self, word: str, arguments: list[str]) -> bool:
        if "-e" in arguments:
            write_package(self.site, "ssd-serve", "0.2.0", origin=Path(word).as_uri())
            return True
        wanted = Requirement(word)
        version = wanted.url.partition("@v")[2] if wanted.url else self._best(wanted)
        if version is None:
            print(f"ERROR: No matching distribution found for {wanted}", file=sys.stderr)
            return False
        needs = ["ninja", "jinja2>=3", "torch>=2.8"] if wanted.name == "amd-flashinfer" else []
        write_package(self.site, wanted.name, version, needs)
        if wanted.name in MODULES:
            write_module(self.site, MODULES[wanted.name], self.mood["source"])
        return True

    def _best(self, wanted: Requirement) -> str | None:
        for line in self.constraints:
            limit = Requirement(line)
            if limit.name == wanted.name and (limit.marker is None or limit.marker.evaluate()):
                wanted.specifier &= limit.specifier
        exact = [each.version for each in wanted.specifier if each.operator == "=="]
        offers: list[str] = self.mood["index"].get(wanted.name, ["99.0", *exact])
        fitting = [offer for offer in offers if wanted.specifier.contains(offer)]
        return max(fitting, key=Version) if fitting else None


def main(place: Path, arguments: list[str]) -> int:
    """Record the call, and run it."""
    pip = Pip(place)
    with (place / "pip.jsonl").open("a", encoding="utf-8") as calls:
        calls.write(json.dumps({"arguments": arguments, "constraints": pip.constraints}) + "\n")
    return pip.run(arguments)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
