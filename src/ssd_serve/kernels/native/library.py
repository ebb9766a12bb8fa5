"""The compiled kernels as Python functions. Knows how C functions are called, not what they compute."""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from ssd_serve.base.devices import processor_name
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.errors import SsdError
from ssd_serve.base.logs import Logger
from ssd_serve.base.trusted_files import cache_folder, is_own_file, make_folder, open_lock, weakness

POINTER, SIZE, INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
FLOAT, DOUBLE = ctypes.c_float, ctypes.c_double

SOURCES = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")

_SHARED = ("-std=gnu11", "-O3", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math")
_FUSED = "--param=avoid-fma-max-bits=0"
"""GCC fuses multiplications with additions, but for some processors (Zen) not in every loop, as it takes that
to be slower there. The same sum would be rounded otherwise in another tile."""
_FLAGS = (("-march=native", _FUSED), ("-march=native",), ("-mcpu=native",), ())
"""Tried in turn: processors are named differently on ARM."""
_LONGEST_S = 120.0


class NativeError(SsdError):
    """The kernels could not be compiled or loaded; slower ones are used."""


class NativeLibrary:
    """Loaded library. Functions run without the interpreter's lock."""

    def __init__(self, path: Path, log: Logger | None = None) -> None:
        self.path = path
        self._log = log
        self._rejected: set[str] = set()
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeError(f"the compiled kernels cannot be loaded: {error}") from error

    def accept(self, kernels: str, right: bool) -> bool:
        """Return `right`, the outcome of the self-test of some kernels; log once if it is False."""
        if not right and kernels not in self._rejected:
            self._rejected.add(kernels)
            if self._log is not None:
                self._log.warning("compiled kernels fail their self-test: torch's are used", kernels=kernels)
        return right

    def function(self, name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
        """A function by its name in C and the ctypes of its arguments."""
        found = self._library[name]
        found.argtypes = arguments
        found.restype = result
        wrapped: Callable[..., Any] = found
        return wrapped


def native_library(config: EngineConfig, log: Logger | None = None) -> NativeLibrary | None:
    """The compiled kernels, if the settings want them and this machine can have them."""
    return load_native(config.cache_dir, log) if config.native_kernels else None


def load_native(
    folder: Path, log: Logger | None = None, compilers: Sequence[str] = COMPILERS
) -> NativeLibrary | None:
    """Compile (once) and load; None where that is not possible; the reason is logged."""
    warn = log.warning if log is not None else lambda _line: None
    try:
        return NativeLibrary(build(cache_folder(folder, warn), compilers), log)
    except NativeError as error:
        if log is not None:
            log.info("slower kernels are used", reason=str(error))
        return None


def compile_early(wanted: bool, folder: Path) -> None:
    """Compile in a thread what workers will load; they report errors."""

    def compiled() -> None:
        with suppress(SsdError):
            build(cache_folder(folder, lambda _: None))

    if wanted:
        threading.Thread(target=compiled, name="kernels", daemon=True).start()


def build(folder: Path, compilers: Sequence[str] = COMPILERS) -> Path:
    """The compiled library in `folder`, compiled now if it is not there. Raises `NativeError`."""
    compiler = next((found for name in compilers if (found := shutil.which(name))), None)
    if compiler is None:
        raise NativeError(f"no C compiler ({', '.join(compilers)}) is on the PATH")
    sources = sorted(SOURCES.glob("*.c"))
    path = folder / f"native-{_digest(sources, compiler)}.so"
    try:
        make_folder(folder)
        if why := weakness(folder):
            raise NativeError(f"compiled kernels are not loaded from where others can put theirs: {why}")
        with os.fdopen(open_lock(folder / "native.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the processes of one server start together
            if not is_own_file(path):
                _compile(sources, compiler, path)
    except OSError as error:
        raise NativeError(f"compiled kernels cannot be kept in {folder}: {error}") from error
    return path


def _compile(sources: Sequence[Path], compiler: str, path: Path) -> None:
    complaint = ""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        name = Path(folder) / path.name
        for flags in _FLAGS:
            complaint = _compile_with((*_SHARED, *flags), sources, compiler, name)
            if not complaint:
                os.chmod(name, 0o700)  # linkers go by the umask
                os.replace(name, path)
                return
    raise NativeError(f"{compiler} could not compile the kernels: {complaint}")


def _compile_with(flags: Sequence[str], sources: Sequence[Path], compiler: str, path: Path) -> str:
    """Compile the sources at the same time and link them; return the first complaint, empty: there is none."""
    objects = [path.with_name(f"{source.stem}.o") for source in sources]
    pairs = zip(sources, objects, strict=True)
    words = [[compiler, *flags, "-c", str(source), "-o", str(made)] for source, made in pairs]
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        complaints = list(compilers.map(_run, words))
    link = [compiler, *flags, "-shared", *map(str, objects), "-o", str(path), "-lm"]
    return next(filter(None, complaints), "") or _run(link)


def _run(words: Sequence[str]) -> str:
    """The last line of what the compiler complained about; empty when it succeeded."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_LONGEST_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _digest(sources: Sequence[Path], compiler: str) -> str:
    digest = hashlib.sha256()
    for source in [*sources, *sorted(SOURCES.glob("*.h"))]:
        digest.update(source.read_bytes())
    known = os.stat(compiler)
    digest.update(f"{os.path.realpath(compiler)} {known.st_size} {known.st_mtime_ns}".encode())
    digest.update(f"{platform.machine()} {_SHARED} {_FLAGS} {processor_name()}".encode())
    return digest.hexdigest()[:24]
