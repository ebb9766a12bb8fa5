"""The compiled kernels as Python functions. Knows how C functions are called, not what they compute."""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ssd_serve.base.logs import Logger
from ssd_serve.base.owned import cache_folder
from ssd_serve.base.settings import Settings
from ssd_serve.kernels.native.build import COMPILERS, NativeError, build

POINTER, SIZE, INT, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float


class NativeLibrary:
    """One loaded library. Functions run without the interpreter's lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeError(f"the compiled kernels cannot be loaded: {error}") from error

    def function(self, name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
        """A function by its name in C and the ctypes of its arguments."""
        found = self._library[name]
        found.argtypes = arguments
        found.restype = result
        wrapped: Callable[..., Any] = found
        return wrapped


def native_library(settings: Settings, log: Logger | None = None) -> NativeLibrary | None:
    """The compiled kernels, if the settings want them and this machine can have them."""
    return load_native(settings.cache_dir, log) if settings.native_kernels else None


def load_native(
    folder: Path, log: Logger | None = None, compilers: Sequence[str] = COMPILERS
) -> NativeLibrary | None:
    """Compile (once) and load; None where that is not possible, which is said in the log."""
    warn = log.warning if log is not None else lambda _line: None
    try:
        return NativeLibrary(build(cache_folder(folder, warn), compilers))
    except NativeError as error:
        if log is not None:
            log.info("slower kernels are used", reason=str(error))
        return None
