"""How peers were built, as they say themselves: compilers, flags, and the variables of those that have some.

Knows how each engine is asked; nothing here is timed.
"""

import os
import re
import subprocess
from pathlib import Path

from ssd_serve.bench.peers.ways import LLAMA, PLAIN, TRANSFORMERS, VLLM, Place, Way, variables

_ASK_S = 120.0
_TORCH_BUILD = "import torch; print(torch.__config__.show())"
_SYSTEM_INFO = "system_info:"
_NO_MODEL = ("-lv", "4", "-m", os.devnull)
"""llama.cpp tells what its build can use before it finds that this is no model."""
_OPTIONS = (
    "CMAKE_BUILD_TYPE:",
    "CMAKE_C_FLAGS:",
    "CMAKE_CXX_FLAGS:",
    "CMAKE_CXX_FLAGS_RELEASE:",
    "GGML_NATIVE:",
    "GGML_OPENMP:",
    "GGML_BLAS:",
)


def peer_builds(place: Place) -> dict[str, dict[str, str]]:
    """By engine, of those that are there."""
    peers, found = place.peers, dict[str, dict[str, str]]()
    if peers.llama_server is not None:
        found[LLAMA] = {
            "version": _said([str(peers.llama_server), "--version"]),
            "build": _cmake(peers.llama_server),
            "system_info": _from(_SYSTEM_INFO, _said([str(peers.llama_server), *_NO_MODEL])),
        }
    if peers.vllm_python is not None:
        told = variables(Way(VLLM, PLAIN), place)
        shown = {name: Path(value).name if value.startswith("/") else value for name, value in told.items()}
        found[VLLM] = {"torch": _said([str(peers.vllm_python), "-c", _TORCH_BUILD]), **shown}
    if peers.transformers_python is not None:
        found[TRANSFORMERS] = {"torch": _said([str(peers.transformers_python), "-c", _TORCH_BUILD])}
    return found


def log_of(way: Way, place: Place) -> Path:
    """Where an engine's process writes what it has to say."""
    return place.work / f"{re.sub('[^a-z0-9.]+', '-', way.label.lower())}.log"


def _said(words: list[str]) -> str:
    """What a command prints, on one line; nothing where it cannot be run."""
    try:
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return " ".join(done.stdout.split())


def _from(mark: str, text: str) -> str:
    """The text from this mark to the end of its list; nothing where there is none."""
    found = text[text.index(mark) :] if mark in text else ""
    return found[: found.rindex("|")].strip() if "|" in found else found


def _cmake(program: Path) -> str:
    """How a program was configured, where it still lies in its build folder."""
    for folder in program.resolve().parents:
        cache = folder / "CMakeCache.txt"
        if cache.is_file():
            lines = cache.read_text(encoding="utf-8", errors="replace").splitlines()
            return " ".join(f"-D{line}" for line in lines if line.startswith(_OPTIONS))
    return ""
